"""A core on a scripted world: nothing runs on a stream until the test says so."""

from __future__ import annotations

import random

from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.engine.drafter import Drafter
from shared.engine.plan import StepPlan
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, make_core
from tests.support.cores.simulated_streams import World

FORWARD, COPY, TRANSFER, COLD = "forward", "copy", "transfer", "cold"


def job(rid: int, num_prompt: int = 12, max_tokens: int = 12, **sampling: object) -> Job:
    """Random prompt by rid; nothing stops it before max_tokens."""
    rng = random.Random(rid)
    prompt = tuple(rng.randrange(95) for _ in range(num_prompt))
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.8, **sampling), rid)  # type: ignore[arg-type]


class Script:
    """A loop step may launch, and runs nothing; the world moves by `world.run...` only."""

    def __init__(self, drafter: Drafter | None = None, **knobs: object) -> None:
        self.world = World.script()
        defaults: dict = {"backend": "simulated", "page_size": 4, "num_pages": 60, "chunk_size": 64}
        self.core: NodeCore = make_core(CoreKnobs(**(defaults | knobs)), self.world, drafter)
        self.outcome = Outcome()
        self.plans: list[StepPlan] = []
        launch = self.core.engine.launch

        def record(plan: StepPlan):  # noqa: ANN202
            self.plans.append(plan)
            return launch(plan)

        self.core.engine.launch = record  # type: ignore[method-assign]

    def submit(self, *jobs: Job) -> list[Request]:
        requests = [one.request() for one in jobs]
        for req in requests:
            self.core.scheduler.intake.submit(req)
        return requests

    def step(self) -> None:
        """Process what is done, launch what may be launched."""
        self.core.loop.step()
        self.outcome.take(self.core)

    def step_done(self) -> None:
        """One loop step, then all streams to their end."""
        self.step()
        self.world.run_until_idle()

    def run_until_running(self, *requests: Request) -> None:
        """All of them decode, all launched steps are done and processed but for the newest, which has not begun."""
        for _ in range(50):
            if all(req.state.value == "running" and req.output_ids for req in requests):
                return
            self.world.run_until_idle()
            self.step()
        raise AssertionError("they never ran")

    def in_flight(self) -> StepPlan:
        """The newest launched plan, of which nothing has run yet."""
        lease = self.core.engine.leases[-1]
        assert isinstance(lease.work, StepPlan) and lease.forward is not None and not lease.forward.done.peek()
        return lease.work

    def finish(self, budget: int = 2000) -> Outcome:
        for _ in range(budget):
            if not self.core.queues.requests and self.core.loop.idle:
                return self.outcome
            self.world.run_until_idle()
            self.step()
        raise AssertionError(f"no end after {budget} loop steps")
