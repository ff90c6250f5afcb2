"""What the router learns about one incarnation of a node from its reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.fleet.node_room import NodeRoom
from router.fleet.prompt_cost import PromptFigures
from router.fleet.slowness import Slowness
from shared.wire.messages import NodeLoad

HANDOFF_COST = "handoff_cost_seconds"
TOKENS, SECONDS = COUNTERS = ("pulled_tokens", "pull_seconds")
KEPT = 0.75  # each heartbeat with new pulls multiplies the earlier sums by this factor
FRESH_S = 60.0
MOST_TOKENS, MOST_SECONDS = 1e12, 1e9


class PullFigures:
    """How long a prefill node's pulls of cached pages take, from its heartbeats.

    Time lost in failed pulls counts too, so a node whose pulls often fail is told to compute."""

    __slots__ = ("_measured_at", "_seconds", "_tokens", "_totals")

    def __init__(self) -> None:
        self._totals = 0.0, 0.0
        self._tokens = self._seconds = 0.0
        self._measured_at = -float("inf")

    def learn(self, counters: Mapping[str, float], now: float) -> None:
        totals = counters.get(TOKENS, 0.0), counters.get(SECONDS, 0.0)
        tokens, seconds = (new - old for new, old in zip(totals, self._totals, strict=True))
        self._totals = totals
        if seconds <= 0.0 or tokens < 0.0 or tokens > MOST_TOKENS or seconds > MOST_SECONDS:
            return
        if now - self._measured_at > FRESH_S:
            self._tokens = self._seconds = 0.0
        self._tokens = KEPT * self._tokens + tokens
        self._seconds = KEPT * self._seconds + seconds
        self._measured_at = now

    def token_s(self, now: float) -> float | None:
        """Return the seconds per copied token: infinity if no token came, None if not measured lately."""
        if now - self._measured_at > FRESH_S:
            return None
        return self._seconds / self._tokens if self._tokens else float("inf")


@dataclass(slots=True, eq=False)
class NodeFigures:
    prompts: PromptFigures = field(default_factory=PromptFigures)
    pulls: PullFigures = field(default_factory=PullFigures)
    slowness: Slowness = field(default_factory=Slowness)
    room: NodeRoom = field(default_factory=NodeRoom)

    def learn(self, role: str, load: NodeLoad, now: float) -> None:
        self.prompts.learn(load.counters, load.observations.get(HANDOFF_COST, ()), now)
        self.pulls.learn(load.counters, now)
        self.slowness.learn(role, load, now)
