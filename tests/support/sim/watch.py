"""Which transitions of the state machines a run took: requests on nodes, requests at the router, hand-offs at both
ends. Reads only; names its states itself where the production code has them in several fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from decode_node.handoff_in import HandoffIn
from decode_node.side import DecodeSide
from prefill_node.side import PrefillSide
from router.requests.journal import OpenRequest
from shared.core.request import Request, RequestState
from shared.node.loop.node import Node
from tests.support.sim.hosts import NodeHost, RouterHost
from tests.support.sim.report import Step


@contextmanager
def watching_requests(
    steps: Counter[Step], moved: Callable[[Request, RequestState, RequestState], None]
) -> Iterator[None]:
    """Every Request.to while this lasts."""
    original = Request.to

    def to(self: Request, state: RequestState) -> None:
        before = self.state
        original(self, state)
        steps["request", before.value, state.value] += 1
        moved(self, before, state)

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
        states: dict[object, str] = {(r.rid, r.attempt.number): router_state(r) for r in host.journal.all()}
        self._compare("router", host.port.identity, states, "over")

    def _compare(self, machine: str, owner: str, states: dict[object, str], end: str) -> None:
        before = self._last.get(owner, {})
        for key, state in states.items():
            if before.get(key, "new") != state:
                self.steps[machine, before.get(key, "new"), state] += 1
        for key, state in before.items():
            if key not in states:
                retried = machine == "router" and any(other[0] == key[0] for other in states)  # type: ignore[index]
                self.steps[machine, state, "retry" if retried else end] += 1
        self._last[owner] = states


def router_state(request: OpenRequest) -> str:
    attempt = request.attempt
    place = "+".join(name for name, node in (("P", attempt.prefill), ("D", attempt.decode)) if node is not None)
    if not place:
        return "parked"
    if place == "P+D" and attempt.begun_by_decode:
        return "P+D handed over"
    return f"{place} {'streaming' if request.has_started else 'queued'}"


def handoff_states(node: Node) -> dict[object, str]:
    side = node.side
    if isinstance(side, PrefillSide):
        states: dict[object, str] = {handoff.key: "behind its leader" for handoff in side.bootstrap._behind()}
        for handoff in side.bootstrap.offered.values():
            states[handoff.key] = "told to wait" if handoff.heard_at is not None else "offered"
        for handoff in side.inflight.granted.values():
            states[handoff.key] = "record sent" if handoff.record_sent else "granted"
        return states
    assert isinstance(side, DecodeSide)
    sinks: dict[object, str] = {req.key: "waiting" for req in side.prealloc.requests()}
    sinks.update({handoff.key: sink_state(handoff) for handoff in side.transfers.open.values()})
    sinks.update({handoff.key: "held" for handoff, _ in side.transfers.copies.held})
    return sinks


def sink_state(handoff: HandoffIn) -> str:
    if handoff.record is not None:
        return "record here"
    return "pulling" if handoff.num_pulling else "granted"
