"""Bring requests back whose copies out of the cold tier have ended, and begin the next copies. See offload.py."""

from __future__ import annotations

from shared.engine.engine import Engine
from shared.sched.scheduler import Scheduler


class Readmissions:
    """The loop's way to the cold tier: copies are polled beside the steps and never waited for while a step runs."""

    def __init__(self, scheduler: Scheduler, engine: Engine) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._offload = scheduler.queues.offload

    @property
    def num_copies(self) -> int:
        """Return how many copies are under way."""
        return self._offload.num_jobs

    def take(self) -> bool:
        """Admit requests whose KV is whole again. Return True when a copy began or ended."""
        before = self.num_copies
        admission = self._scheduler.take_restored()
        if admission is not None:
            self._engine.admit(admission)
        return self.num_copies != before or admission is not None

    def wait_oldest(self) -> None:
        """Wait for the oldest copy, if there is one."""
        self._offload.wait()
