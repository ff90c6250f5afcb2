"""Readmit requests from the cold tier, and begin the next copies of offload.py."""

from __future__ import annotations

from shared.engine.engine import Engine
from shared.sched.scheduler import Scheduler


class Readmissions:
    """Waits for a copy only while no step runs."""

    def __init__(self, scheduler: Scheduler, engine: Engine) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._offload = scheduler.queues.offload

    @property
    def num_copies(self) -> int:
        return self._offload.num_jobs

    def take(self) -> bool:
        """Return True if a copy began or ended."""
        before = self.num_copies
        admission = self._scheduler.take_restored()
        if admission is not None:
            self._engine.admit(admission)
        return self.num_copies != before or admission is not None

    def wait_oldest(self) -> None:
        self._offload.wait()
