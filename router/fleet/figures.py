"""What the router learns about one incarnation of a node from its reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fleet.node_room import NodeRoom
from router.fleet.prompt_cost import PromptFigures
from router.fleet.pull_cost import PullFigures
from router.fleet.slowness import Slowness
from shared.wire.messages import NodeLoad

HANDOFF_COST = "handoff_cost_seconds"


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
