"""Which transitions of the state machines a run took: requests on nodes, requests at the router, hand-offs at both
ends. Reads only; names its states itself where the production code has them in several fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from decode_node.handoff_in import HandoffIn
from decode_node.loop import DecodeSide
from prefill_node.loop import PrefillSide
from router.journal import OpenRequest
from shared.core.request import TRANSITIONS, Request, RequestState
from shared.handoff.node import Node
from tests.sim.hosts import NodeHost, RouterHost

Step = tuple[str, str, str]  # machine, from, to
EXPECTED_ROUTER = frozenset(
    {
        *((("router", "new", f"{place} queued")) for place in ("P>D", "D", "P")),
        *((("router", f"{place} queued", f"{place} streaming")) for place in ("P>D", "D", "P")),
        ("router", "P>D queued", "P>D handed over"),
        ("router", "P>D streaming", "P>D handed over"),
        *((("router", f"P>D {state}", "over")) for state in ("queued", "streaming", "handed over")),
        *((("router", f"{place} {state}", "over")) for place in ("D", "P") for state in ("queued", "streaming")),
        *((("router", f"{place} {state}", "retry")) for place in ("P>D", "D", "P") for state in ("queued", "streaming")),
        ("router", "P>D handed over", "retry"),
    }
)
EXPECTED_HANDOFF = frozenset(
    {
        *((("source", "new", state)) for state in ("offered", "behind its leader")),
        *((("source", "behind its leader", state)) for state in ("offered", "gone")),
        *((("source", "offered", state)) for state in ("told to wait", "granted", "gone")),
        *((("source", "told to wait", state)) for state in ("granted", "gone")),
        *((("source", "granted", state)) for state in ("record sent", "gone")),
        ("source", "record sent", "gone"),
        ("sink", "new", "waiting"),
        ("sink", "new", "granted"),
        *((("sink", "waiting", state)) for state in ("granted", "gone")),
        *((("sink", "granted", state)) for state in ("pulling", "record here", "gone", "held")),
        ("sink", "pulling", "gone"),
        ("sink", "record here", "gone"),
        ("sink", "held", "gone"),
    }
)
EXPECTED_REQUEST = frozenset(("request", old.value, new.value) for old in TRANSITIONS for new in TRANSITIONS[old])
EXPECTED = EXPECTED_REQUEST | EXPECTED_ROUTER | EXPECTED_HANDOFF


@contextmanager
def watching_requests(steps: Counter[Step]) -> Iterator[None]:
    """Every Request.to while this lasts."""
    original = Request.to

    def to(self: Request, state: RequestState) -> None:
        before = self.state
        original(self, state)
        steps["request", before.value, state.value] += 1

    Request.to = to  # type: ignore[method-assign]
    try:
        yield
    finally:
        Request.to = original  # type: ignore[method-assign]


@dataclass
class Watch:
    """Compares the states of now with those of its last look."""

    steps: Counter[Step] = field(default_factory=Counter)
    _last: dict[str, dict[object, str]] = field(default_factory=dict)

    def look_at_node(self, host: NodeHost) -> None:
        if host.node is not None and host.port is not None:
            machine = "source" if isinstance(host.node.side, PrefillSide) else "sink"
            self._compare(machine, host.port.name, handoff_states(host.node), "gone")

    def look_at_router(self, host: RouterHost) -> None:
        states: dict[object, str] = {}
        before = self._last.get(host.port.identity, {})
        for request in host.journal.all():
            known = before.get(("attempt", request.rid))
            if known is not None and known != str(request.attempt):
                self.steps["router", before[request.rid], "retry"] += 1
                before[request.rid] = "new"
            states[request.rid] = router_state(request)
        self._compare("router", host.port.identity, states, "over")
        states.update({("attempt", request.rid): str(request.attempt) for request in host.journal.all()})

    def _compare(self, machine: str, owner: str, states: dict[object, str], end: str) -> None:
        before = {key: state for key, state in self._last.get(owner, {}).items() if not is_attempt(key)}
        for key, state in states.items():
            if before.get(key, "new") != state:
                self.steps[machine, before.get(key, "new"), state] += 1
        for key, state in before.items():
            if key not in states:
                self.steps[machine, state, end] += 1
        self._last[owner] = states


def is_attempt(key: object) -> bool:
    return isinstance(key, tuple) and key[0] == "attempt"


def router_state(request: OpenRequest) -> str:
    names = [name for name, node in (("P", request.prefill), ("D", request.decode)) if node is not None]
    place = ">".join(names)
    if len(names) == 2 and request.begun_by_decode:
        return f"{place} handed over"
    return f"{place} {'streaming' if request.has_started else 'queued'}"


def handoff_states(node: Node) -> dict[object, str]:
    side = node.side
    if isinstance(side, PrefillSide):
        states: dict[object, str] = {handoff.key: "behind its leader" for handoff in side.bootstrap._behind()}
        for handoff in side.bootstrap.offered.values():
            states[handoff.key] = "told to wait" if handoff.answered else "offered"
        for handoff in side.inflight.granted.values():
            states[handoff.key] = "record sent" if handoff.record_sent else "granted"
        return states
    assert isinstance(side, DecodeSide)
    sinks: dict[object, str] = {req.key: "waiting" for req in side.prealloc.requests()}
    sinks.update({handoff.key: sink_state(handoff) for handoff in side.transfers.open.values()})
    sinks.update({handoff.key: "held" for handoff, _ in side.transfers.held})
    return sinks


def sink_state(handoff: HandoffIn) -> str:
    if handoff.record is not None:
        return "record here"
    return "pulling" if handoff.num_pulling else "granted"
