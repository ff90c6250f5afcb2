"""The nodes that dialled in: who they are, what they last reported, and which of them fit together. Sans-IO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from router.breaker import Breaker
from router.kinds import Kind, Kinds, Misfit, misfit
from router.prefix_index import MAX_PAGES, PageIndex
from router.prompt_cost import PromptFigures
from router.room import tokens_in
from shared.core.states import RowState
from shared.wire.messages import CacheEvents, CacheReplay, Drain, Heartbeat, Hello, NodeLoad

ROLES = ("prefill", "decode")
HANDOFF_COST = "handoff_cost_seconds"  # of the metrics that nodes report


def age(hello: Hello) -> tuple[int, int]:
    """Grows with a node's lives, and in each with its connections."""
    return hello.epoch, hello.connection


@dataclass(slots=True, eq=False)
class RegisteredNode:
    """One node of one epoch. The open_* counts are of this router's own requests."""

    peer: str  # the name its connection goes by
    hello: Hello
    kind: Kind
    node_id: str
    role: str
    known_since: float
    last_seen: float
    breaker: Breaker = field(default_factory=Breaker)
    # Of its last report, added up when it came: a placement looks at each node.
    free_tokens: float = float("inf")
    num_reported: int = 0  # sequences that run or wait there
    num_running: int = 0  # those of them that decode
    waiting_tokens: int = 0
    prompts: PromptFigures = field(default_factory=PromptFigures)
    pages: PageIndex = field(default_factory=PageIndex)
    is_draining: bool = False
    drain: Drain | None = None  # what it was told; said again until its heartbeats say that it drains
    move_at: float = float("inf")  # draining: when what is left there goes on elsewhere
    is_silent: bool = False
    open_sequences: int = 0
    open_prompt_tokens: int = 0
    dispatched: int = 0
    _load: NodeLoad | None = None

    @property
    def load(self) -> NodeLoad | None:
        """What it last said of itself."""
        return self._load

    @load.setter
    def load(self, load: NodeLoad) -> None:
        taken = sum(load.rows.get(state, 0) for state in RowState if state is not RowState.FREE)
        self._load, self.num_reported, self.waiting_tokens = load, taken + load.waiting, load.waiting_tokens
        self.num_running = load.rows.get(RowState.RUNNING, 0)
        self.free_tokens = tokens_in(load, self.hello.fingerprint.page_size)

    def has_room(self, num_tokens: int) -> bool:
        """Return whether it can take so many tokens now, without waiting. No node without a free page has room, one
        that has not reported yet has all of it."""
        return self.free_tokens >= max(1, num_tokens)

    @property
    def is_there(self) -> bool:
        return not self.is_draining and not self.is_silent

    def drain_now(self, drain: Drain, now: float) -> Drain:
        """Return what it is told of its drain, with what is left of the time."""
        return msgspec.structs.replace(drain, move_after_ms=max(0, round(1000 * (self.move_at - now))))

    def has_adapter(self, digest: str) -> bool:
        return any(adapter.digest == digest for adapter in self.hello.adapters)

    def can_take(self, now: float) -> bool:
        return self.is_there and self.breaker.allows(now)


class Registry:
    """Node id -> its newest epoch. A message by an older epoch is nobody's. `follows_caches`: ask nodes what they have
    cached."""

    def __init__(self, silence_s: float, *, follows_caches: bool = False) -> None:
        self.silence_s = silence_s
        self._follows_caches = follows_caches
        self._nodes: dict[str, RegisteredNode] = {}
        self._kinds = Kinds()
        self.narrowest = 0  # what every node can hold, silent ones too

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
        """(the node, the one it replaces). (None, None) for an older life or connection than known, or a role we don't
        have. What has fallen silent keeps nobody out: a clock that went back makes the next life look like an older
        one.

        The same epoch on a new connection: the node keeps its counts and replaces itself, for it has dropped what it
        had of us when it saw the old one break, and what was on its way is lost. On the same connection it only asks
        for its Welcome again, and goes on with what it has.
        """
        known = self._nodes.get(hello.node_id)
        is_late = known is not None and not known.is_silent and age(known.hello) > age(hello)
        if hello.role not in ROLES or is_late:
            return None, None
        if known is not None:
            self._kinds.leave(known.kind, hello.node_id)
        kind = self._kinds.join(hello)
        if known is not None and known.hello.epoch == hello.epoch:
            known.kind, known.role = kind, hello.role
            is_new = known.hello.connection != hello.connection
            known.peer, known.hello, known.last_seen, known.is_silent = peer, hello, now, False
            if is_new:  # the node has forgotten what it had told
                known.pages = PageIndex()
            self._measure()
            return known, known if is_new else None
        node = RegisteredNode(peer, hello, kind, hello.node_id, hello.role, known_since=now, last_seen=now)
        self._nodes[hello.node_id] = node
        self._measure()
        return node, known

    def _measure(self) -> None:
        self.narrowest = min((node.hello.max_context for node in self._nodes.values()), default=0)

    def heartbeat(self, beat: Heartbeat, now: float) -> RegisteredNode | None:
        """None when the sender never said Hello. A silent node that speaks again is back."""
        node = self.find(beat.node_id, beat.epoch)
        if node is not None:
            node.load = beat.load
            node.prompts.learn(beat.load.counters, beat.load.observations.get(HANDOFF_COST, ()), now)
            node.is_draining = node.is_draining or beat.draining
            if beat.draining and beat.move_after_ms is not None:  # the limit that another router may have set
                node.move_at = now + beat.move_after_ms / 1000
            self.seen(node, now)
        return node

    def cache_events(self, peer: str, message: CacheEvents) -> CacheReplay | None:
        """Take what a node says of its own cache; of another one's nobody is believed. Return what to ask it."""
        node = self.find(message.node_id, message.epoch)
        if not self._follows_caches or node is None or node.peer != peer:
            return None
        is_taken = node.pages.take(message)
        if sum(len(each.pages) for each in self._nodes.values()) > MAX_PAGES:  # who tells most makes room for all
            max(self._nodes.values(), key=lambda each: len(each.pages)).pages.forget_pages()
        if is_taken or node.pages.is_asked:
            return None
        node.pages.is_asked = True
        return CacheReplay(node.node_id, node.pages.seq)

    def missed_events(self, node: RegisteredNode, beat: Heartbeat) -> CacheReplay | None:
        """Return what to ask a node whose heartbeat tells of CacheEvents that have not come."""
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
        """Nodes that have just crossed the limit; each is told once."""
        late = [n for n in self._nodes.values() if not n.is_silent and now - n.last_seen > self.silence_s]
        for node in late:
            node.is_silent = True
        return late

    def usable(self, now: float) -> list[RegisteredNode]:
        """Nodes that may get a request. Where every breaker is open, all that are there: an answer that may fail is
        better than none."""
        there = [node for node in self._nodes.values() if not node.is_draining and not node.is_silent]
        return [node for node in there if node.breaker.allows(now)] or there

    def is_anyone_there(self) -> bool:
        """Return whether any node is usable."""
        return any(node.is_there for node in self._nodes.values())

    def max_context(self) -> int | None:
        """What the largest node that is there can hold; None without nodes. Not the smallest: one that says little of
        itself would shut everybody else's requests out."""
        return max(self._contexts(), default=None)

    def common_context(self) -> int | None:
        """What every node that is there can hold: who asks for no length gets one that ties it to no node."""
        return min(self._contexts(), default=None)

    def _contexts(self) -> list[int]:
        return [node.hello.max_context for node in self._nodes.values() if not node.is_silent]

    def adapters(self) -> dict[str, str]:
        """Digest of each LoRA adapter by the name that clients use. Where nodes differ, what most of them have counts,
        and of equally many what was there first: one node gives no name another meaning."""
        votes: dict[str, Counter[str]] = {}
        there = sorted((node for node in self._nodes.values() if not node.is_silent), key=lambda node: node.known_since)
        for node in there:
            own = {adapter.name: adapter.digest for adapter in node.hello.adapters}  # a node has one vote for a name
            for name, digest in own.items():
                votes.setdefault(name, Counter())[digest] += 1
        return {name: max(counts, key=lambda digest: counts[digest]) for name, counts in votes.items()}

    def misfits(self) -> list[Misfit]:
        """Return (node, other node, field) for nodes that can't be a pair, whichever of them prefills."""
        return self._kinds.misfits()


def misfits_of(node: RegisteredNode) -> list[tuple[Kind, Misfit]]:
    """Return the kinds that a node can't be a pair with, each with an example."""
    return [(other, misfit(node.node_id, other, differs)) for other, differs in node.kind.apart.items()]


def fitting(prefills: Sequence[RegisteredNode], decode: RegisteredNode) -> list[RegisteredNode]:
    """Return the nodes whose pages the decode node can use."""
    strangers = decode.kind.apart
    return [node for node in prefills if node.kind not in strangers]
