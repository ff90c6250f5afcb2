"""Prefill and decode nodes back to back in one process, on HashLM, over a network that the test carries by hand."""

from __future__ import annotations

import io
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from decode_node.side import DecodeSide
from prefill_node.pulls import TRANSPORTS
from prefill_node.side import PrefillSide
from shared.device.gpu import Gpu
from shared.model.math.interface import Model
from shared.node.assembly.fingerprint import make_fingerprint
from shared.node.loop.context import NodeContext, NodeFacts
from shared.node.loop.node import Node
from shared.node.records.core import NodeCore
from shared.node.records.mail import Dial, HangUp, Outgoing
from shared.node.records.tombstones import Tombstones
from shared.node.routers.dialled import Routers
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.node_metrics import NodeMetrics
from shared.transfer.group_thread import Group
from shared.transfer.interface import PageReceiver
from shared.transfer.transports import make_receiver, make_sender
from shared.wire.codec import decode, encode, key_of, to_wire
from shared.wire.messages import (
    Abort,
    Begun,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Key,
    Message,
    PrefixSource,
    Scores,
    SequenceEnd,
    TokenLogprob,
    Tokens,
    Welcome,
)
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received, peer_name
from shared.wire.ranges import MAX_MS
from shared.wire.tickets import NodeTicket, make_ticket, ticket_key
from tests.support.cores.core_rig import CoreKnobs, Job, make_core
from tests.support.cores.twin_groups import TwinGroup
from tests.support.machine.patience import HANG_GUARD_S

ROUTER = "tcp://127.0.0.1:7001"
ROUTER_ID, ROUTER_EPOCH = "test", 1
LEASE_S = 60.0
PAUSE_S = 0.0002
SECRET = b"the secret of a router in tests!"


def make_node(
    role: str,
    node_id: str,
    knobs: CoreKnobs,
    epoch: int = 1,
    transport: str = "zmq",
    core: NodeCore | None = None,
    make_group: Callable[[str, int], Group] = TwinGroup,
    gpu: Gpu | None = None,
    lora_dir: str = "",
    model: Model | None = None,
) -> Node:
    """`core`, `model`: others than the knobs describe. `gpu`: that of its pool, if it is on one."""
    core = core or make_core(replace(knobs, shared_memory=role == "prefill" and transport == "shm"), model=model)
    planes = core.pool.planes
    facts = NodeFacts(
        role=role,
        node_id=node_id,
        epoch=epoch,
        endpoint=f"tcp://127.0.0.1:{9000 + epoch}",
        host_id="here",
        transports=(transport,),
        fingerprint=make_fingerprint(
            core.model.spec,
            planes,
            knobs.page_size,
            core.engine.worker.drafter,
            "test",
            core.scheduler.intake.grammar_version,
            num_parts=core.pool.num_parts,
        ),
        max_context=512,
        max_running=knobs.max_running,
        lease_s=LEASE_S,
        lora_dir=lora_dir,
    )
    log = LogOnce(Logger(node_id, io.StringIO()))
    books = (Routers((ROUTER,)), Tombstones(LEASE_S), NodeMetrics(), log)
    ctx = NodeContext(core, facts, *books, clock=lambda: 0.0, make_group=make_group)
    side = (
        PrefillSide(ctx, {transport: make_sender(transport, core.pool, gpu)}, receivers_of(transport, core, gpu))
        if role == "prefill"
        else DecodeSide(ctx, {transport: make_receiver(transport, core.pool, gpu)})
    )
    return Node(ctx, side)


def receivers_of(transport: str, core: NodeCore, gpu: Gpu | None) -> dict[str, PageReceiver]:
    """Return what a prefill node pulls prefixes with."""
    return {transport: make_receiver(transport, core.pool, gpu)} if transport in TRANSPORTS else {}


def name_of(node: Node) -> str:
    return peer_name(node.ctx.facts.node_id, node.ctx.facts.epoch)


@dataclass
class FakeRouter:
    """Keeps what nodes report; a token must come at the next position, or repeat what is known."""

    streams: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    by_node: dict[tuple[str, Key], list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[Key, list[SequenceEnd]] = field(default_factory=lambda: defaultdict(list))
    heartbeats: dict[str, Heartbeat] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    goodbyes: list[str] = field(default_factory=list)
    begun: list[tuple[str, Key]] = field(default_factory=list)
    scores: dict[Key, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[Key, dict[int, tuple]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, peer: str, message: Message) -> None:
        if isinstance(message, Tokens):
            for run in message.runs:
                self._take_run(message.node_id, run)
            for end in message.ends:
                self.ends[end.key].append(end)
        elif isinstance(message, Heartbeat):
            assert sum(message.load.pages.values()) == message.load.pages_total
            assert sum(message.load.rows.values()) == message.load.rows_total
            self.heartbeats[message.node_id] = message
        elif isinstance(message, Hello):
            self.hellos.append(message)
        elif isinstance(message, Goodbye):
            self.goodbyes.append(message.node_id)
        elif isinstance(message, Scores):
            known = self.scores[message.key]
            assert message.first_pos == len(known) + 1, f"{message.key} left a gap in its scores, or repeated some"
            assert message.key not in self.streams, f"{message.key} said a token before its prompt was scored"
            known.extend(message.logprobs)
        elif isinstance(message, Begun):
            self.begun.extend((message.node_id, key) for key in message.keys)
        else:
            raise AssertionError(f"{message} at a router")

    def _take_run(self, node_id: str, run: object) -> None:
        stream = self.streams[run.key]
        known = stream[run.first_pos : run.first_pos + len(run.ids)]
        assert run.ids[: len(known)] == known, f"{run.key} repeated other tokens"
        assert run.first_pos <= len(stream), f"{run.key} left a gap"
        stream.extend(run.ids[len(known) :])
        self.by_node[node_id, run.key].extend(run.ids)
        for offset, logprob in enumerate(run.logprobs):
            self.logprobs[run.key].setdefault(run.first_pos + offset, logprob)

    def end(self, key: Key) -> SequenceEnd:
        assert self.ends[key], f"{key} never ended"
        return self.ends[key][0]


Filter = Callable[[str, str, Message], bool]


class Net:
    """Messages between nodes and one router, encoded and decoded on the way. FIFO per pair unless a test reorders.

    `drop(src, dst, message)` True: lost. `hold`: kept back until `release_held`. Time is whatever the test says.
    """

    def __init__(self, nodes: Sequence[Node], seed: int = 0) -> None:
        self.nodes = {name_of(node): node for node in nodes}
        self.router = FakeRouter()
        self.inboxes: dict[str, deque[Inbound]] = {name: deque() for name in self.nodes}
        self.now = 0.0
        self.drop: Filter = lambda src, dst, message: False
        self.hold: Filter = lambda src, dst, message: False
        self.kept: list[tuple[str, str, Outgoing]] = []
        self.seen: list[tuple[str, str, Message]] = []
        self.dead: set[str] = set()
        self.no_way: set[tuple[str, str]] = set()  # (who dials, whom): nothing ever comes of it
        self.links: set[tuple[str, str]] = set()  # dialled, and up
        self.on_message: Callable[[str, str, Message], None] = lambda src, dst, message: None
        self.rng = random.Random(seed)
        for name in self.nodes:
            self.inboxes[name].append(PeerUp(ROUTER))
            self.to_node(name, Welcome(ROUTER_ID, ROUTER_EPOCH, connection=1))

    def to_node(self, name: str, message: Message, source: str = ROUTER) -> None:
        if isinstance(message, Welcome) and not message.ticket_key:
            message = welcome_for(name, message, self.now)
        self.inboxes[name].append(Received(source, decode(encode(message))))

    def generate(
        self,
        node: Node,
        job: Job,
        decode_node: Node | None = None,
        *,
        num_sequences: int = 1,
        output_ids: list[list[int]] | None = None,
        remaining_ms: int = 3_600_000,
        attempt: int = 0,
        endpoint: str | None = None,
        source: PrefixSource | None = None,
        trace: str = "",
    ) -> Key:
        key = Key(ROUTER_ID, ROUTER_EPOCH, f"r{job.rid}", attempt, 0)
        facts = decode_node.ctx.facts if decode_node is not None else None
        message = Generate(
            key=key,
            prompt_ids=list(job.prompt),
            output_ids=output_ids or [[] for _ in range(num_sequences)],
            num_sequences=num_sequences,
            sampling=to_wire(job.sampling),
            seed=job.seed,
            decode_node=facts.node_id if facts else "",
            decode_epoch=facts.epoch if facts else 0,
            decode_endpoint=(endpoint or facts.endpoint) if facts else "",
            remaining_ms=remaining_ms,
            ended=[],
            adapter=job.adapter,
            scored=1,
            cache_salt=job.cache_salt,
            ticket=ticket_for(key, name_of(node), name_of(decode_node), job, num_sequences) if decode_node else None,
            source=source,
            tenant=job.tenant,
            trace=trace,
        )
        self.to_node(name_of(node), message)
        return key

    def abort(self, node: Node, key: Key, all_sequences: bool = False) -> None:
        self.to_node(name_of(node), Abort(key, all_sequences))

    def kill(self, node: Node) -> None:
        """Like kill -9: the others see a closed connection."""
        name = name_of(node)
        node.side.close()  # the system closes its connections
        self.dead.add(name)
        self.inboxes[name].clear()
        for other in self.nodes:
            if other not in self.dead:
                self.inboxes[other] += PeerClosed(name), PeerClosed(name, accepted=True)

    def tick(self, name: str) -> bool:
        """One tick with everything that has come; whether anything happened."""
        node, box = self.nodes[name], self.inboxes[name]
        inbox = list(box)
        box.clear()
        actions = node.tick(inbox, self.now)
        for action in actions:
            if isinstance(action, Outgoing):
                self.carry(name, action)
            elif isinstance(action, Dial):
                self._dial(name, action.peer)
            elif isinstance(action, HangUp):
                self._hang_up(name, action.peer)
        return bool(inbox) or node.busy or any(not self._is_heartbeat(a) for a in actions)

    def _dial(self, name: str, peer: str) -> None:
        link = (name, peer)
        if peer in self.nodes and peer not in self.dead and link not in self.links | self.no_way:
            self.links.add(link)
            self.inboxes[name].append(PeerUp(peer))

    def _hang_up(self, name: str, peer: str) -> None:
        if (name, peer) in self.links:
            self.links.discard((name, peer))
            self.inboxes[peer].append(PeerClosed(name, accepted=True))

    @staticmethod
    def _is_heartbeat(action: object) -> bool:
        return isinstance(action, Outgoing) and isinstance(action.message, Heartbeat)

    def carry(self, source: str, action: Outgoing) -> None:
        self.on_message(source, action.peer, action.message)
        if source in self.dead or action.peer in self.dead or (source, action.peer) in self.no_way:
            return
        if self.drop(source, action.peer, action.message):
            return
        if self.hold(source, action.peer, action.message):
            self.kept.append((source, action.peer, action))
            return
        self.deliver(source, action)

    def deliver(self, source: str, action: Outgoing) -> None:
        message = decode(encode(action.message))
        self.seen.append((source, action.peer, message))
        if action.peer == ROUTER:
            self.router.take(source, message)
        else:
            frames = tuple(bytes(frame) for frame in action.frames)
            self.inboxes[action.peer].append(Received(source, message, frames))

    def release_held(self, shuffle: bool = False) -> None:
        kept, self.kept = self.kept, []
        if shuffle:
            self.rng.shuffle(kept)
        for source, _, action in kept:
            self.deliver(source, action)

    def let_go(self) -> None:
        """Deliver what was held back, and hold nothing any more."""
        self.hold = lambda src, dst, message: False
        self.release_held()

    def run(self, budget: int = 5000, until: Callable[[], bool] | None = None) -> None:
        """Until nothing moves (or `until` holds)."""
        quiet = 0
        for _ in range(budget):
            if until is not None and until():
                return
            moved = [self.tick(name) for name in self.nodes if name not in self.dead]
            quiet = 0 if any(moved) else quiet + 1
            if quiet > 2:
                return
        raise AssertionError(f"no end after {budget} rounds")

    def run_until_ended(self, keys: Sequence[Key]) -> None:
        """For streams with threads, where quiet does not mean finished."""
        deadline = time.monotonic() + HANG_GUARD_S
        while not all(self.router.ends[key] for key in keys):
            assert time.monotonic() < deadline, "no end"
            self.turn()

    def settle(self, *nodes: Node) -> None:
        """Let what is in flight come home, then look for leaks."""
        deadline = time.monotonic() + HANG_GUARD_S
        while not all(node.idle for node in nodes):
            assert time.monotonic() < deadline, "never idle"
            self.turn()
        assert_clean(*nodes)

    def turn(self) -> None:
        """Everyone once. When nothing moved, the threads of streams and transfers get the interpreter."""
        if not any([self.tick(name) for name in self.nodes]):
            time.sleep(PAUSE_S)

    def at(self, seconds: float) -> None:
        self.now += seconds

    def messages(self, kind: type[Message]) -> list[Message]:
        return [message for _, _, message in self.seen if isinstance(message, kind)]


def welcome_for(name: str, message: Welcome, now: float) -> Welcome:
    """The router's Welcome to a node, with that node's key of tickets."""
    return msgspec.structs.replace(message, ticket_key=ticket_key(SECRET, name), clock_ms=round(1000 * now))


def ticket_for(key: Key, source: str, target: str, job: Job, num_sequences: int = 1) -> NodeTicket:
    """The router's word for a hand-off between two peers, for ever."""
    return make_ticket(
        ticket_key(SECRET, target),
        key_of(key),
        source,
        num_sequences=num_sequences,
        most_tokens=len(job.prompt) + job.sampling.max_tokens,
        deadline_ms=MAX_MS,
    )


def assert_clean(*nodes: Node) -> None:
    """Nothing leaked, in any book."""
    for node in nodes:
        core = node.ctx.core
        core.kv.check_integrity(idle=True)
        core.kv.flush_cache()
        core.kv.check_integrity(idle=True)
        assert core.kv.allocator.num_free == core.kv.allocator.num_total
        assert not core.queues.requests and not core.queues.ungranted and not core.engine.leases
        assert node.idle
        side = node.side
        if isinstance(side, PrefillSide):
            assert not side.bootstrap.offered and not side.inflight.granted and not side.bootstrap._followers
            assert not side.loans.open and not side.pulls.open and not side.pulls.copies.held
        else:
            assert isinstance(side, DecodeSide)
            assert not side.prealloc.requests() and not side.transfers.open and not side.transfers.copies.held
            groups = side.transfers.groups
            assert not any(groups._asked.values()) and not groups._waiting and not groups._out


def expected(job: Job, seq_index: int = 0) -> list[int]:
    from shared.core.keys import sequence_seed

    return job.expected_of(sequence_seed(job.seed, seq_index))


def sibling(key: Key, index: int) -> Key:
    return to_wire(key_of(key).sibling(index))
