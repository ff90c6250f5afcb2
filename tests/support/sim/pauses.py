"""How many steps of its node a stream pauses in mid-answer, while no step fails.

A retracted request keeps its place in the order of arrival, so it waits only for older requests. What was emitted on
another node does not count: a stream that goes on after a fault has lost its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.core.keys import RequestKey
from tests.support.sim.hosts import NodeHost
from tests.support.sim.oracles import Violation

MOST_STEPS = 400


@dataclass
class Emitted:
    num_tokens: int
    step: int
    here: bool  # whether this node emitted a token of it


@dataclass
class PauseWatch:
    longest: int = 0
    _seen: dict[tuple[str, int, int], dict[RequestKey, Emitted]] = field(default_factory=dict)

    def look(self, host: NodeHost) -> None:
        """After a round of the node."""
        if host.node is None:
            return
        loop = host.node.ctx.core.loop
        seen = self._seen.setdefault((host.name, host.lives, loop.num_failed_steps), {})
        for key, req in host.node.ctx.core.queues.requests.items():
            before, num_tokens = seen.get(key), len(req.output_ids)
            if before is None or num_tokens > before.num_tokens:
                seen[key] = Emitted(num_tokens, loop.num_steps, here=before is not None)
            elif before.here and req.handoff_to is None:
                self._paused(host, key, loop.num_steps - before.step)

    def _paused(self, host: NodeHost, key: RequestKey, num_steps: int) -> None:
        self.longest = max(self.longest, num_steps)
        if num_steps > MOST_STEPS:
            raise Violation(f"{host.name} let {key} pause for {num_steps} steps in mid-answer", host.name)
