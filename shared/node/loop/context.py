"""Hold the state and the operations that a node and its side share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.core.errors import AdapterMissing, BatonError, ConfigError, InvalidRequest
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.states import FinishReason
from shared.device.cpu import do_nothing
from shared.node.records.core import NodeCore
from shared.node.records.departure import Departure
from shared.node.records.mail import Outbox
from shared.node.records.request_spans import RequestSpans
from shared.node.records.tombstones import Tombstones
from shared.node.routers.dialled import Routers
from shared.observe.log_once import LogOnce
from shared.observe.node_metrics import NodeMetrics
from shared.sched.steps.events import Ended
from shared.transfer.group_thread import Group
from shared.wire.messages import Fingerprint


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The node's identity and limits, constant after the start."""

    role: str
    node_id: str
    epoch: int
    endpoint: str  # where peers dial this node
    host_id: str
    transports: tuple[str, ...]
    fingerprint: Fingerprint
    max_context: int
    max_running: int
    max_waiting: int = 1024
    heartbeat_s: float = 0.5
    lease_s: float = 60.0
    silence_s: float = 5.0  # after this time an unreachable peer counts as gone
    about_transports: str = ""  # why these transports were chosen
    lora_dir: str = ""  # the folder whose adapters routers may make this node load; "": none


def no_group(transport: str, rank: int) -> Group:
    raise ConfigError(f"this node makes no process groups, so it can't use {transport}")


@dataclass(slots=True)
class NodeContext:
    """Owned by the node's loop thread."""

    core: NodeCore
    facts: NodeFacts
    routers: Routers
    tombstones: Tombstones
    metrics: NodeMetrics
    log: LogOnce
    clock: Callable[[], float]
    wake: Callable[[], None] = do_nothing  # tells the loop that there is work; any thread may call `wake`
    make_group: Callable[[str, int], Group] = no_group  # makes a group for a transport and a rank
    wire_counts: Counter[str] = field(default_factory=Counter)  # the links' counts of dropped messages
    cores: Callable[[], str] = str  # describes the CPU cores in use
    spans: RequestSpans = field(default_factory=RequestSpans)
    outbox: Outbox = field(default_factory=Outbox)
    ends: list[Ended] = field(default_factory=list)  # ends of requests that the scheduler doesn't know
    leaving: Departure | None = None  # set: the node takes no new requests
    arrivals: int = 0

    def next_arrival(self) -> int:
        self.arrivals += 1
        return self.arrivals

    def drop(self, peer: str, kind: str) -> None:
        """Count a dropped message. Log it once per kind and peer."""
        self.metrics.count("wire_errors")
        self.log.warning((peer, kind), "dropped a message", peer=peer, why=kind)

    def drop_late(self, peer: str, kind: str, key: RequestKey) -> None:
        """Call `drop`, unless the request is open or has just ended."""
        if not self.tombstones.covers(key) and key not in self.core.requests:
            self.drop(peer, kind)

    def end(self, key: RequestKey, error: BatonError) -> None:
        self.ends.append(Ended(key, FinishReason.ERROR, 0, 0, error))

    def missing_adapter(self, req: Request, *, is_offered: bool = False) -> AdapterMissing | None:
        """`is_offered`: a prefill node had accepted the request, perhaps before the adapter began to leave."""
        table = self.core.settings.adapters
        if table.serves(req.ask.adapter) or (is_offered and table.holds(req.ask.adapter)):
            return None
        return AdapterMissing(f"{self.facts.node_id} does not have the adapter {req.ask.adapter[:100]}")

    def unconstrained(self, req: Request) -> InvalidRequest | None:
        """Attach the request's constraint, or return why it can't be followed."""
        try:
            self.core.scheduler.intake.constrain(req)
        except InvalidRequest as error:
            return error
        return None

    def bad_ids(self, req: Request) -> InvalidRequest | None:
        vocab_size = self.core.spec.vocab_size
        prompt, outputs, sampling = req.ask.prompt_ids, req.output_ids, req.ask.sampling
        if len(prompt) and int(prompt.max()) >= vocab_size or any(i >= vocab_size for i in outputs):
            return InvalidRequest(f"a token id beyond the vocabulary of {vocab_size}")
        if any(token_id >= vocab_size for token_id, _ in sampling.logit_bias):
            return InvalidRequest(f"logit_bias: a token id beyond the vocabulary of {vocab_size}")
        if any(token_id >= vocab_size for token_id in sampling.allowed_token_ids):
            return InvalidRequest(f"allowed_token_ids: a token id beyond the vocabulary of {vocab_size}")
        if len(outputs) >= sampling.max_tokens:
            return InvalidRequest("output_ids: as many tokens as max_tokens allows, or more")
        return None
