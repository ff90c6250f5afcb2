"""The production scheduler on its books alone: no memory, no model, no clock. A test says when a step ends."""

from __future__ import annotations

from shared.engine.plan import StepPlan, StepResult
from shared.sched.scheduler import make_scheduler
from shared.sched.steps.settings import SchedSettings


class LightScheduler:
    """Steps end one after another, with token 1 for each row."""

    def __init__(self, settings: SchedSettings, num_pages: int, max_running: int) -> None:
        self.scheduler = make_scheduler(settings, num_pages, max_running)
        self.queues = self.scheduler.queues
        self._open: StepPlan | None = None

    def round(self) -> StepPlan | None:
        """End the open step, and begin the next one."""
        if self._open is not None:
            self.scheduler.process(StepResult.plain(self._open, [1] * self._open.batch_size))
        self._open = self.scheduler.planner.plan()
        return self._open
