"""Readmit requests from the cold tier, and begin the next copies of offload.py."""

from __future__ import annotations

from shared.core.request import RequestState
from shared.engine.engine import Engine
from shared.sched.memory.offload import Restore
from shared.sched.requests.queues import Queues
from shared.sched.steps.prebuilt import Arrival, build_admission
from shared.sched.steps.settings import SchedSettings


class Readmissions:
    """Waits for a copy only while no step runs."""

    def __init__(self, queues: Queues, settings: SchedSettings, engine: Engine) -> None:
        self._queues = queues
        self._settings = settings
        self._engine = engine
        self._offload = queues.offload

    @property
    def num_copies(self) -> int:
        return self._offload.num_jobs

    def take(self) -> bool:
        """Readmit restored requests. Those with complete KV join without a forward.

        Return True if a copy began or ended.
        """
        queues, before = self._queues, self.num_copies
        whole = [restore.request for restore in self._offload.take_done() if self._came_back(restore)]
        self._offload.save_cold()
        if whole:
            queues.counters.readmissions += len(whole)
            arrivals = [Arrival(req, req.output_ids[-1], req.computed, (), {}) for req in whole]
            admission = build_admission(self._engine.new_step(), arrivals, self._settings)
            queues.join(whole, admission.committed.tolist(), admission.step, 0)
            self._engine.admit(admission)
        return self.num_copies != before or bool(whole)

    def _came_back(self, restore: Restore) -> bool:
        req, queues = restore.request, self._queues
        req.computed = restore.num_tokens
        queues.remember(req)
        runs_alone = req in queues.suspects  # a suspect is computed in a separate chunk
        if runs_alone or req.computed < req.num_tokens - 1 or not req.output_ids or self._settings.drafts.relays_drafts:
            queues.begin_prefill(req, req.all_ids(), req.computed)
            return False
        req.to(RequestState.RUNNING)
        return True

    def wait_oldest(self) -> None:
        self._offload.wait()
