"""The overlap loop: resolve (all that may wait or raise) -> plan N (pure) -> launch N -> process N-1, always.

The plain loop is the same with depth 0 and gives the same tokens. The loop never sleeps in receive while a lease is
open: the node's poll wakes it for completions too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shared.core.errors import BatonError, RankLost, StepFailed
from shared.engine.engine import Engine
from shared.engine.lease import StepLease
from shared.engine.plan import RowId, StepPlan
from shared.sched.events import ChunkLaunched
from shared.sched.prebuilt import Arrival
from shared.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineLoop:
    """Drives one scheduler and one engine. Counts steps; owns nothing else."""

    def __init__(self, scheduler: Scheduler, engine: Engine, overlap: bool) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.depth = int(overlap) + len(engine.streams.stages)
        self._num_left = 0
        self.num_steps = 0
        self.num_failed_steps = 0
        self._launched: list[ChunkLaunched] = []

    def admit(self, arrivals: Sequence[Arrival]) -> None:
        """Install PREBUILT records whose KV is here."""
        admission = self.scheduler.process_prebuilt(arrivals)
        if admission is not None:
            self.engine.admit(admission)

    def step(self, block: bool = False) -> bool:
        """Process what is done and launch what may be launched. True when anything happened. With `block`, waits
        for the oldest step when nothing could be launched."""
        progressed = self._process_done() | self._take_restored()
        if self._num_open_steps() <= self.depth and self._launch_next():
            progressed = True
        elif block and not progressed:
            progressed = self._wait_oldest()
        return progressed

    @property
    def idle(self) -> bool:
        """No step, no admission and no copy of the cold tier is under way."""
        return not self.engine.leases and not self._num_copies

    @property
    def _num_copies(self) -> int:
        offload = self.scheduler.queues.offload
        return 0 if offload is None else offload.num_jobs

    def _wait_oldest(self) -> bool:
        offload = self.scheduler.queues.offload
        self.engine.flush()
        if self.engine.leases:
            self.engine.leases[0].done.synchronize()
        elif offload is not None:
            offload.wait()
        return self._process_done() | self._take_restored()

    def _take_restored(self) -> bool:
        before = self._num_copies
        admission = self.scheduler.take_restored()
        if admission is not None:
            self.engine.admit(admission)
        return self._num_copies != before or admission is not None

    def _num_open_steps(self) -> int:
        return sum(isinstance(lease.work, StepPlan) for lease in self.engine.leases)

    def _launch_next(self) -> bool:
        if not self._resolve():
            return True
        plan = self.scheduler.plan(self.engine.unsampled_steps)
        if plan is None:
            return self.engine.flush()  # whoever could step next waits for what these say
        self._settle_rows()
        self._announce(plan, self.engine.launch(plan))
        self.num_steps += 1
        return True

    def _announce(self, plan: StepPlan, lease: StepLease) -> None:
        if lease.layers is None:
            return
        for row_id, num_tokens, emits in zip(plan.row_ids, plan.chunk_ends, plan.emits, strict=False):  # chunks first
            self._launched.append(ChunkLaunched(row_id.key, num_tokens, bool(emits), lease.layers))

    def take_launched(self) -> list[ChunkLaunched]:
        """Chunks whose layers can be waited for, launched since the last call."""
        launched, self._launched = self._launched, []
        return launched

    def _settle_rows(self) -> None:
        """Row or pages of a request that has left may have a new owner in the next step. What the sampling of the old
        one's last step still writes (history, drafts, a tree's path) comes before that step's forward."""
        if self.scheduler.budget.num_left != self._num_left:
            self._num_left = self.scheduler.budget.num_left
            self.engine.flush()

    def _resolve(self) -> bool:
        """Exact host lengths, for backends that can't do without. False when the step waited for had failed."""
        if not self.scheduler.settings.needs_cpu_seq_lens or not self.engine.publishes:
            return True
        running = self.scheduler.running
        publish_ready = self.engine.newest_publish()
        if publish_ready is not None:
            publish_ready.synchronize()
            if publish_ready.error is not None:
                self._drain()
                return False
        if len(running):
            lengths = self.engine.future_map.resolve_seq_lens_cpu(running.req_pool_indices, publish_ready)
            self.scheduler.resolve(lengths)
        return True

    def _drain(self) -> None:
        """Close leases up to the failed one, which starts the recovery."""
        failures = self.num_failed_steps
        self.engine.flush()
        while self.engine.leases and self.num_failed_steps == failures:
            self.engine.leases[0].done.synchronize()
            self._process_done()

    def _process_done(self) -> bool:
        progressed = False
        while self.engine.leases and self.engine.leases[0].has_ended:
            lease = self.engine.leases[0]
            try:
                result = self.engine.collect()
            except Exception as error:
                self._recover(lease, error)
                return True
            if result is not None:
                self.scheduler.process(result)
            progressed = True
        return progressed

    def _recover(self, lease: StepLease, error: Exception) -> None:
        if isinstance(error, RankLost):
            raise error  # nothing can run here any more: the requests are not to blame
        self.num_failed_steps += 1
        logger.error("step %d failed: %s: %s", lease.step, type(error).__name__, error)
        drained: list[RowId] = []
        for other in self.engine.recover():
            drained.extend(other.work.row_ids)
        cause = error if isinstance(error, BatonError) else StepFailed(f"step {lease.step}: {error}")
        self.scheduler.step_failed(lease.work.row_ids, drained, cause)
