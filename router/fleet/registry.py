"""Track the connected nodes: identity, last report, our requests there, fitting partners. Sans-IO."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from router.fleet.breaker import Breaker
from router.fleet.figures import NodeFigures
from router.fleet.kinds import Kind, Kinds, Misfit, misfit
from router.fleet.leaving import Leaving, leaving_after
from router.fleet.node_room import room_in
from router.fleet.prefix_index import MAX_PAGES, PageIndex
from router.fleet.slowness import Share, Slowness
from router.fleet.strangers import Strangers
from router.fleet.unconfirmed import Unconfirmed
from shared.core.states import RowState
from shared.wire.fitting import why_no_grammar
from shared.wire.messages import AdapterOrder, CacheEvents, CacheReplay, Heartbeat, Hello, NodeLoad, Weights
from shared.wire.parts import NO_OTHERS, OthersLoad

ROLES = ("prefill", "decode")


def age(hello: Hello) -> tuple[int, int]:
    return hello.epoch, hello.connection


@dataclass(slots=True)
class Report:
    """A node's newest report, and sums of it that each placement reads for every node."""

    load: NodeLoad | None = None
    others: OthersLoad = NO_OTHERS
    lacks: tuple[str, ...] = ()
    adapter_orders: Sequence[AdapterOrder] = ()
    num_sequences: int = field(default=0, init=False)  # that run or wait
    num_running: int = field(default=0, init=False)  # sequences that decode
    waiting_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        load = self.load
        if load is not None:
            taken = sum(load.rows.get(state, 0) for state in RowState if state is not RowState.FREE)
            self.num_sequences, self.waiting_tokens = taken + load.waiting, load.waiting_tokens
            self.num_running = load.rows.get(RowState.RUNNING, 0)


@dataclass(frozen=True, slots=True)
class Needs:
    """What all nodes of a request must have: an adapter (its digest; "": none), a protocol of at least this version,
    and grammars."""

    adapter: str = ""
    version: int = 0
    has_grammar: bool = False


NO_NEEDS = Needs()


@dataclass(slots=True)
class OurRequests:
    """open_*: our open requests on a node. sent_*: our requests since its last report. Each other router is assumed to
    have sent equally many."""

    open_sequences: int = 0
    open_prompt_tokens: int = 0
    open_prompt_work: int = 0  # open prompt tokens that the node had not cached
    sent_sequences: int = 0
    sent_prompt_work: int = 0
    dispatched: int = 0


@dataclass(slots=True, eq=False)
class RegisteredNode:
    """One epoch of a node."""

    peer: str
    hello: Hello
    kind: Kind
    known_since: float
    last_seen: float
    turn: bytes = b""  # breaks ties between nodes; differs between routers
    report: Report = field(default_factory=Report)
    ours: OurRequests = field(default_factory=OurRequests)
    figures: NodeFigures = field(default_factory=NodeFigures)
    pages: PageIndex = field(default_factory=PageIndex)
    breaker: Breaker = field(default_factory=Breaker)
    unconfirmed: Unconfirmed = field(default_factory=Unconfirmed)  # on this connection
    is_silent: bool = False
    leaving: Leaving | None = None

    @property
    def node_id(self) -> str:
        return self.hello.node_id

    @property
    def role(self) -> str:
        return self.hello.role

    def reported(
        self,
        load: NodeLoad,
        others: OthersLoad = NO_OTHERS,
        lacks: Sequence[str] = (),
        adapter_orders: Sequence[AdapterOrder] = (),
        *,
        all_say_kept: bool = True,
    ) -> None:
        """Replace the report. It counts all requests sent earlier. `all_say_kept`: see node_room.py."""
        ours, fingerprint = self.ours, self.hello.fingerprint
        self.report = Report(load, others, tuple(lacks), adapter_orders)
        self.figures.room = room_in(
            load, fingerprint, ours.open_sequences, ours.open_prompt_tokens, all_say_kept=all_say_kept
        )
        ours.sent_sequences = ours.sent_prompt_work = 0

    @property
    def sequences(self) -> int:
        """Estimate all routers' sequences on this node. The report is up to a heartbeat old, but our own requests are
        known."""
        ours, others = self.ours, self.report.others
        here = max(ours.open_sequences, self.report.num_sequences - others.sequences)
        return here + others.sequences + others.routers * ours.sent_sequences

    @property
    def prompt_tokens(self) -> int:
        """Like `sequences`, estimate the uncached prompt tokens that wait. Reports also count cached tokens."""
        ours, others = self.ours, self.report.others
        cached = ours.open_prompt_tokens - ours.open_prompt_work
        own = max(ours.open_prompt_work, self.report.waiting_tokens - others.waiting_tokens - cached)
        return own + others.waiting_tokens + others.routers * ours.sent_prompt_work

    @property
    def weight(self) -> float:
        """The factor by which policies multiply the node's work.

        After QUIET_S of idleness the factor is 1: the next request shows whether the node has recovered."""
        slowness = self.figures.slowness
        weight = slowness.weight
        return 1.0 if weight > 1.0 and slowness.is_quiet and self.is_idle else weight

    @property
    def weighted_sequences(self) -> float:
        weight = self.weight
        return self.sequences if weight == 1.0 else (self.sequences + 1) * weight - 1

    @property
    def weighted_tokens(self) -> float:
        return self.prompt_tokens * self.weight

    @property
    def is_idle(self) -> bool:
        return not self.sequences and not self.prompt_tokens

    @property
    def is_held_back(self) -> bool:
        return self.figures.slowness.share is Share.TRICKLE and not self.is_idle

    def has_room(self, num_tokens: int) -> bool:
        """Return whether the node can take these tokens immediately. A node without a report has room."""
        return self.figures.room.free_tokens >= max(1, num_tokens)

    @property
    def is_there(self) -> bool:
        return not self.is_silent and self.leaving is None

    @property
    def is_draining(self) -> bool:
        return self.leaving is not None and self.leaving.is_draining

    def meets(self, needs: Needs) -> bool:
        if self.hello.fingerprint.protocol < needs.version:
            return False
        if needs.has_grammar and self.why_no_grammar:
            return False
        return not needs.adapter or any(own.digest == needs.adapter for own in self.hello.adapters)

    @property
    def why_no_grammar(self) -> str:
        """Return why the node follows no grammars; "" if it follows some."""
        return why_no_grammar(self.hello.fingerprint)

    def can_take(self, now: float) -> bool:
        return self.is_there and self.breaker.allows(now)


def turn_of(router_id: str, node_id: str) -> bytes:
    """Order equal nodes differently at each router. Otherwise all routers would fill the same node."""
    return hashlib.blake2b(f"{router_id}\n{node_id}".encode(errors="surrogatepass"), digest_size=8).digest()


class Registry:
    """Holds the newest epoch of each node."""

    def __init__(self, silence_s: float, *, follows_caches: bool = False, router_id: str = "") -> None:
        self.silence_s = silence_s
        self._router_id = router_id
        self._follows_caches = follows_caches
        self._nodes: dict[str, RegisteredNode] = {}
        self._kinds = Kinds()
        self.strangers = Strangers()
        self.narrowest = 0  # smallest max_context of all nodes, silent ones included

    def __iter__(self) -> Iterator[RegisteredNode]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, node_id: str, epoch: int) -> RegisteredNode | None:
        node = self._nodes.get(node_id)
        return node if node is not None and node.hello.epoch == epoch else None

    def named(self, node_id: str) -> RegisteredNode | None:
        return self._nodes.get(node_id)

    def by_peer(self, peer: str) -> RegisteredNode | None:
        return next((node for node in self._nodes.values() if node.peer == peer), None)

    def hello(self, peer: str, hello: Hello, now: float) -> tuple[RegisteredNode | None, RegisteredNode | None]:
        """Return the node and the node it replaces; (None, None) for an unknown role or an older epoch or connection.

        A silent node is always replaced: its clock may have gone back. A node that reconnects with
        the same epoch has dropped our requests: it replaces itself, so both returned nodes are one object. A Hello on
        the same connection only asks for another Welcome.
        """
        known = self._nodes.get(hello.node_id)
        is_late = known is not None and not known.is_silent and age(known.hello) > age(hello)
        if hello.role not in ROLES or is_late:
            return None, None
        if known is not None:
            self._kinds.leave(known.kind, hello.node_id)
        kind = self._kinds.join(hello)
        if known is not None and known.hello.epoch == hello.epoch:
            is_new = known.hello.connection != hello.connection
            known.peer, known.hello, known.kind = peer, hello, kind
            self.seen(known, now)
            if is_new:  # the node tells its whole cache anew
                known.pages = PageIndex()
                known.unconfirmed = Unconfirmed()
            self._measure()
            return known, known if is_new else None
        turn = turn_of(self._router_id, hello.node_id) if self._router_id else b""
        node = RegisteredNode(peer, hello, kind, known_since=now, last_seen=now, turn=turn)
        self._nodes[hello.node_id] = node
        self._measure()
        return node, known

    def ended_by(self, hello: Hello) -> RegisteredNode | None:
        """Return the node's life before this one, if it is registered."""
        known = self._nodes.get(hello.node_id)
        return known if known is not None and (known.is_silent or age(known.hello) < age(hello)) else None

    def _measure(self) -> None:
        self.narrowest = min((node.hello.max_context for node in self._nodes.values()), default=0)

    def heartbeat(self, beat: Heartbeat, now: float) -> RegisteredNode | None:
        """Take a report, even of a silent node. Return None for an unknown node."""
        node = self.find(beat.node_id, beat.epoch)
        if node is not None:
            all_say_kept = self._kinds.all_know(node.role, "NodeLoad.kept_pages")
            node.reported(beat.load, beat.others, beat.lacks, beat.adapter_orders, all_say_kept=all_say_kept)
            node.figures.learn(node.role, beat.load, now)
            node.figures.slowness.judge(self._peers(node, now), now)
            node.leaving = leaving_after(node.leaving, beat, now)
            self.seen(node, now)
        return node

    def _peers(self, node: RegisteredNode, now: float) -> Iterator[Slowness]:
        kinds = (node.kind, *node.kind.neighbours)
        others = (self._nodes[name] for kind in kinds for name in kind.node_ids if name != node.node_id)
        return (other.figures.slowness for other in others if other.can_take(now))

    def cache_events(self, peer: str, message: CacheEvents) -> CacheReplay | None:
        node = self.find(message.node_id, message.epoch)
        if not self._follows_caches or node is None or node.peer != peer:
            return None
        is_taken = node.pages.take_events(message)
        if sum(len(each.pages) for each in self._nodes.values()) > MAX_PAGES:
            max(self._nodes.values(), key=lambda each: len(each.pages)).pages.forget_pages()
        if is_taken or node.pages.is_asked:
            return None
        node.pages.is_asked = True
        return CacheReplay(node.node_id, node.pages.seq)

    def missed_events(self, node: RegisteredNode, beat: Heartbeat) -> CacheReplay | None:
        if not self._follows_caches or not node.pages.is_behind(beat.cache_seq):
            return None
        node.pages.is_asked = True
        return CacheReplay(node.node_id, node.pages.seq)

    def seen(self, node: RegisteredNode, now: float) -> None:
        node.last_seen = now
        node.is_silent = False

    def remove(self, node: RegisteredNode) -> None:
        if self._nodes.get(node.node_id) is node:
            del self._nodes[node.node_id]
            self._kinds.leave(node.kind, node.node_id)
            self._measure()

    def newly_silent(self, now: float) -> list[RegisteredNode]:
        late = [n for n in self._nodes.values() if not n.is_silent and now - n.last_seen > self.silence_s]
        for node in late:
            node.is_silent = True
        return late

    def usable(self, now: float) -> list[RegisteredNode]:
        """Return the nodes that may get a request. If every breaker is open, return all: a likely failure beats a
        certain one."""
        there = [node for node in self._nodes.values() if node.is_there]
        return [node for node in there if node.breaker.allows(now)] or there

    def is_anyone_there(self) -> bool:
        return any(node.is_there for node in self._nodes.values())

    def max_context(self) -> int | None:
        """Return the largest context limit, if any. With the smallest, one node could make the router refuse long
        requests."""
        return max(self._contexts(), default=None)

    def common_context(self) -> int | None:
        """Return the context limit that every node meets: the default for requests without a length."""
        return min(self._contexts(), default=None)

    def _contexts(self) -> list[int]:
        return [node.hello.max_context for node in self._nodes.values() if not node.is_silent]

    def why_no_grammar(self) -> str:
        """Return why no node follows grammars; "" if one does, or if there are no nodes."""
        reasons = [node.why_no_grammar for node in self._nodes.values() if not node.is_silent]
        return reasons[0] if reasons and all(reasons) else ""

    def weights(self) -> Weights | None:
        """Return what the oldest node says of its weights."""
        there = sorted((node for node in self._nodes.values() if not node.is_silent), key=lambda node: node.known_since)
        return next((node.hello.weights for node in there if node.hello.weights is not None), None)

    def adapters(self) -> dict[str, str]:
        """Return each LoRA adapter's digest by name. If nodes differ, the majority decides, so one node can't redefine
        a name. On a tie, the oldest node decides."""
        votes: dict[str, Counter[str]] = {}
        there = sorted((node for node in self._nodes.values() if not node.is_silent), key=lambda node: node.known_since)
        for node in there:
            own = {adapter.name: adapter.digest for adapter in node.hello.adapters}  # one vote per name and node
            for name, digest in own.items():
                votes.setdefault(name, Counter())[digest] += 1
        return {name: max(counts, key=lambda digest: counts[digest]) for name, counts in votes.items()}

    def misfits(self) -> list[Misfit]:
        return self._kinds.misfits()

    def misfit_status(self, now: float) -> dict[str, object]:
        """Return pairs of nodes that don't fit, and nodes without requests: for /ready and /admin/status."""
        misfits = [{"a": a, "b": b, "differs": name} for a, b, name in self.misfits()]
        return {"misfits": misfits, "strangers": self.strangers.shown(now)}


def of_role(role: str, nodes: Sequence[RegisteredNode]) -> list[RegisteredNode]:
    return [node for node in nodes if node.hello.role == role]


def not_held_back(nodes: Sequence[RegisteredNode]) -> Sequence[RegisteredNode]:
    return [node for node in nodes if not node.is_held_back] or nodes


def misfits_of(node: RegisteredNode) -> list[tuple[Kind, Misfit]]:
    return [(other, misfit(node.node_id, other, differs)) for other, differs in node.kind.apart.items()]


def fitting(prefills: Sequence[RegisteredNode], decode: RegisteredNode) -> list[RegisteredNode]:
    strangers = decode.kind.apart
    return [node for node in prefills if node.kind not in strangers]
