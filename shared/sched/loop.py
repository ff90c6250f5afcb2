"""Run the overlap loop: each round processes a step's result and launches the next step.

    process results -> bring back from the cold tier -> resolve lengths -> plan N (no waits) -> launch N

With overlap, step N is launched while N-1 runs. Without overlap, the depth is 0 and the tokens are the same. A launch
waits or raises only before its plan, because a plan changes the scheduler's state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shared.core.errors import BatonError, DeviceLost, RankLost, StepFailed
from shared.device.faults import blames_device
from shared.engine.engine import Engine
from shared.engine.lease import StepLease
from shared.engine.plan import RowId, StepPlan
from shared.sched.requests.readmissions import Readmissions
from shared.sched.scheduler import Scheduler
from shared.sched.steps.prebuilt import Arrival

# The device is probed after this many consecutive failed steps. One faulty request can fail two steps.
MOST_IN_A_ROW = 3

logger = logging.getLogger(__name__)


class EngineLoop:
    def __init__(self, scheduler: Scheduler, engine: Engine) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.depth = scheduler.settings.depth
        self.num_steps = 0
        self.num_failed_steps = 0
        self._failed_in_a_row = 0
        self._queues = scheduler.queues
        self._readmissions = Readmissions(scheduler.queues, scheduler.settings, engine)

    def step(self, block: bool = False) -> bool:
        """Run one round. Return True if anything happened.

        With `block`, wait for the oldest step if nothing was launched.
        """
        progressed = self._process_results()
        self._make_masks()
        progressed = self._readmissions.take() or progressed
        if self.engine.device_error is not None:
            if not self.engine.leases:  # the results of open steps may show the error
                self._ask_device()
        elif self._num_open_steps() <= self.depth and self._launch_next():
            return True
        if block and not progressed:
            return self._wait_oldest()
        return progressed

    def _launch_next(self) -> bool:
        """Return False if there is nothing to do."""
        if not self._resolve():
            return True
        plan = self.scheduler.planner.plan()
        if plan is None:
            return self.engine.stages.flush()  # rows may wait for tokens that are not sampled yet
        self.engine.stages.settle(self._queues.budget.num_left)
        lease = self.engine.launch(plan)
        if lease.masks is not None:
            self._make_masks()
            self.engine.sample_masked(lease)
        self.scheduler.planner.launched(plan, lease.layers)
        self.num_steps += 1
        return True

    def _process_results(self) -> bool:
        """Return whether a step had ended."""
        self.scheduler.masks.end_broken()
        progressed = False
        while self.engine.leases and self.engine.leases[0].has_ended:
            lease = self.engine.leases[0]
            try:
                result = self.engine.collect()
            except Exception as error:
                self._recover(lease, error)
                return True
            if result is not None:
                self._failed_in_a_row = 0
                self.scheduler.process(result)
            progressed = True
        return progressed

    def _make_masks(self, *, block: bool = False) -> None:
        """Make the oldest open step's masks, after all earlier results are processed.

        With `block`, first wait for the step's drafts. Set `block` if you then wait for the step: it can't end without
        masks.
        """
        lease = self.engine.oldest_step()
        if lease is None or lease.masks is None or lease.masks.is_made:
            return
        drafts = lease.drafts
        if drafts is not None and drafts.copy is not None:
            if not block and not drafts.copy.done.query():
                return
            drafts.copy.done.synchronize()
        assert isinstance(lease.work, StepPlan)
        lease.masks.put(self.scheduler.masks.make(lease.work, None if drafts is None else drafts.on_host()))

    def admit(self, arrivals: Sequence[Arrival]) -> None:
        admission = self.scheduler.grants.process_prebuilt(arrivals)
        if admission is not None:
            self.engine.admit(admission)

    @property
    def idle(self) -> bool:
        return not self.engine.leases and not self._readmissions.num_copies

    def _num_open_steps(self) -> int:
        return sum(isinstance(lease.work, StepPlan) for lease in self.engine.leases)

    def _wait_oldest(self) -> bool:
        self._make_masks(block=True)
        if not self.engine.wait_oldest():
            self._readmissions.wait_oldest()
        progressed = self._process_results()
        return self._readmissions.take() or progressed

    def _resolve(self) -> bool:
        """Read exact lengths if needed. Return False if the awaited step failed."""
        if not self.scheduler.settings.needs_cpu_seq_lens or not self.engine.publishes:
            return True
        running = self._queues.running
        publish_ready = self.engine.newest_publish()
        if publish_ready is not None:
            self._make_masks(block=True)
            records, begin = self.engine.records, self.engine.records.clock()
            publish_ready.synchronize()
            records.add_row("host", "wait for publish", publish_ready.name, begin, records.clock())
            if publish_ready.error is not None:
                self._drain()
                return False
        if len(running):
            lengths = self.engine.future_map.resolve_seq_lens_cpu(running.req_pool_indices, publish_ready)
            running.seq_lens.set_exact(lengths)
        return True

    def _drain(self) -> None:
        """Process results up to the failed step's, which starts the recovery."""
        failures = self.num_failed_steps
        while self.num_failed_steps == failures and self.engine.wait_oldest():
            self._process_results()
            self._make_masks(block=True)

    def _recover(self, lease: StepLease, error: Exception) -> None:
        if isinstance(error, RankLost):
            raise error  # no step can run, and no request is to blame
        self.num_failed_steps += 1
        self._failed_in_a_row += 1
        logger.error("step %d failed: %s: %s", lease.step, type(error).__name__, error)
        drained: list[RowId] = []
        for other in self.engine.recover():
            drained.extend(other.work.row_ids)
        failed = lease.work.row_ids
        results = self.scheduler.results
        if blames_device(error) or self._failed_in_a_row >= MOST_IN_A_ROW or results.to_blame(failed, drained):
            self._ask_device()
        cause = error if isinstance(error, BatonError) else StepFailed(f"step {lease.step}: {error}")
        results.step_failed(failed, drained, cause)

    def _ask_device(self) -> None:
        """Probe the device before a request is blamed.

        Raise DeviceLost if the probe fails: this node would fail every request.
        """
        try:
            self.engine.launch(self.scheduler.planner.probe())
            self.engine.wait_oldest()
            self.engine.collect()
        except RankLost:
            raise
        except Exception as error:
            raise DeviceLost(f"a step without requests failed too: {type(error).__name__}: {error}") from error
        self._failed_in_a_row = 0
        self.engine.device_works()
