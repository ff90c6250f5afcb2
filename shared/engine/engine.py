"""Launch plans, copy results to the host, close leases and recover from errors. The engine does not know requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

import torch

from shared.core.errors import StepFailed
from shared.device.events import Event, StreamSkipped
from shared.device.faults import blames_device
from shared.device.streams import StreamSet
from shared.engine.boundary import Boundary, HostArray, HostCopy, Packed
from shared.engine.future_map import FutureIndices, FutureMap
from shared.engine.lease import StepLease, StepTimes
from shared.engine.masks import StepDrafts, StepMasks
from shared.engine.plan import Admission, StepPlan, StepResult
from shared.engine.results import DRAFT_STATE
from shared.engine.stages import make_stages
from shared.engine.step_arrays import flat_seeds
from shared.engine.worker import OnVerifyComplete, Worker
from shared.kv.accounting import raise_problems
from shared.model.math.interface import LayerMarks, Stage


class Engine:
    """Owner of the open leases. `launch` and `admit` don't wait for the device; `collect` closes the oldest lease.

    forward   | forward(N) sample(N) | forward(N+1) ...
    copy      |        .. d2h(N)     |
    """

    def __init__(
        self,
        streams: StreamSet,
        worker: Worker,
        future_map: FutureMap,
        publishes: bool,
        parts: Sequence[Stage] = (),
    ) -> None:
        """`parts`: a pipeline's stages."""
        self.streams = streams
        self.stages = make_stages(parts, streams, worker.kv, self._launch_sampling)
        self.worker = worker
        self.future_map = future_map
        self.records = future_map.records
        self.publishes = publishes  # whether only the device knows the lengths (width > 1)
        self.leases: deque[StepLease] = deque()
        self._open: dict[int, StepLease] = {}  # open leases by step, to find lost leases
        self.last_done: Event | None = None
        self.device_error: BaseException | None = None  # a transfer's error; a step that runs clears it
        self._next_step = 0

    def new_step(self) -> int:
        self._next_step += 1
        return self._next_step

    def _arm(self, work: StepPlan | Admission) -> Event | None:
        """Return a publish event, or None if `work` publishes no lengths or has no rows (S3)."""
        return Event(f"publish({work.step})") if self.publishes and work.row_ids else None

    def launch(self, plan: StepPlan) -> StepLease:
        """Launch a step. If the lease has masks, call `sample_masked` before the next launch."""
        publish_ready = self._arm(plan)
        times = StepTimes(self.streams.clock)
        layers = LayerMarks(plan.layer_ends) if plan.layer_ends else None
        lease = StepLease(
            plan.step, plan, publish_ready, staging=plan.prefill_input_ids_cpu, times=times, layers=layers
        )
        marks = layers.events if layers is not None else ()
        if any(plan.constrained):
            lease.masks = StepMasks(Event("masks"))
            if plan.width > 1 and plan.num_prefill < plan.batch_size:
                lease.drafts = StepDrafts(Event("drafted"))
                marks = (*marks, lease.drafts.made)
        lease.forward = self.streams.forward.launch(
            self.records.timed("forward", "forward", plan.step, lambda: self.worker.forward(plan, lease)),
            fires=marks,
            label=f"forward({plan.step})",
        )
        lease.computed = lease.forward
        self.leases.append(lease)
        self._open[lease.step] = lease
        if lease.masks is None:
            self.stages.follow(lease)
        else:
            self._launch_drafts_copy(lease)
        return lease

    def sample_masked(self, lease: StepLease) -> None:
        """Launch the sampling of a step with masks. It runs once the masks are made, which may be now or later."""
        assert lease.masks is not None
        self.streams.forward.wait(lease.masks.ready)
        self.stages.follow(lease)

    def _launch_drafts_copy(self, lease: StepLease) -> None:
        drafts = lease.drafts
        if drafts is not None:
            self.streams.copy.wait(drafts.made)
            drafts.copy = self.streams.copy.launch(
                lambda: drafts.download(self.worker.boundary, lease), label=f"drafts({lease.step})"
            )

    def oldest_step(self) -> StepLease | None:
        return next((lease for lease in self.leases if isinstance(lease.work, StepPlan)), None)

    def _launch_sampling(self, lease: StepLease) -> None:
        plan, publish_ready = lease.work, lease.publish_ready
        assert isinstance(plan, StepPlan)

        def on_verify_complete(future: FutureIndices, new_seq_lens: torch.Tensor) -> None:
            if self.publishes:
                self.future_map.publish(future, new_seq_lens, publish_ready)

        fires = (publish_ready,) if publish_ready is not None else ()
        lease.sampled = self.streams.forward.launch(
            self.records.timed("forward", "sample", plan.step, lambda: self._sample(plan, lease, on_verify_complete)),
            fires=fires,
            label=f"sample({plan.step})",
        )
        self._launch_copy(lease)

    def _sample(
        self, plan: StepPlan, lease: StepLease, on_verify_complete: OnVerifyComplete
    ) -> Generator[None, None, Packed]:
        assert lease.computed is not None
        if lease.computed.error is not None:
            raise StepFailed(f"its forward failed: {lease.computed.error}")
        return self.worker.sample(plan, lease, on_verify_complete)

    def admit(self, admission: Admission) -> StepLease:
        """Seed the relay of arrived rows (PREBUILT) on the forward stream, in launch order with the steps.

        First launch the late sampling of earlier steps (stages.py): it may write rows that now belong to the arrived
        requests.
        """
        self.stages.flush()
        publish_ready = self._arm(admission)
        lease = StepLease(admission.step, admission, publish_ready)
        fires = (publish_ready,) if publish_ready is not None else ()
        lease.sampled = self.streams.forward.launch(
            self.records.timed(
                "forward", "admit", admission.step, lambda: self._seed_relay(admission, lease, publish_ready)
            ),
            fires=fires,
            label=f"admit({admission.step})",
        )
        self.leases.append(lease)
        self._open[lease.step] = lease
        self._launch_copy(lease)
        return lease

    def _seed_relay(
        self, admission: Admission, lease: StepLease, publish_ready: Event | None
    ) -> Generator[None, None, None]:
        arrays: dict[str, HostArray] = {
            "rows": admission.req_pool_indices,
            "tokens": admission.tokens,
            "committed": admission.committed,
            "seeded": flat_seeds(admission.history_seeds),
        }
        drafts = {DRAFT_STATE + name: value for name, value in admission.draft_state.items()}
        sent = self.worker.boundary.upload(arrays | drafts, lease)
        rows = FutureIndices(sent["rows"])
        self.future_map.seed_history(admission.history_seeds, sent["seeded"])
        yield
        if self.publishes:
            self.future_map.publish(rows, sent["committed"], publish_ready)
        yield
        extras = {name: sent[DRAFT_STATE + name] for name in admission.draft_state}
        self.future_map.stash(rows, sent["tokens"], admission.step, **extras)

    def _launch_copy(self, lease: StepLease) -> None:
        sampled = lease.sampled
        assert sampled is not None
        self.streams.copy.wait(sampled.done)
        lease.result = self.streams.copy.launch(
            self.records.timed("copy", "d2h", lease.step, lambda: _to_host(lease, self.worker.boundary)),
            label=f"d2h({lease.step})",
        )
        self.last_done = sampled.done

    def newest_publish(self) -> Event | None:
        """Return the newest publish event (S6). The caller waits for this event before it reads lengths."""
        self.stages.flush()
        return next((lease.publish_ready for lease in reversed(self.leases) if lease.publish_ready is not None), None)

    def wait_oldest(self) -> bool:
        """Wait for the oldest lease's result. Return False if no lease is open."""
        self.stages.flush()
        if self.leases:
            self.leases[0].done.synchronize()
        return bool(self.leases)

    def collect(self) -> StepResult | None:
        """Close the oldest lease. Return the step's result, or None for an admission. Raises the step's error."""
        lease = self.leases.popleft()
        del self._open[lease.step]
        return lease.close()

    def heard(self, error: BaseException) -> None:
        """Record an error that may mean a dead device. Between steps, only transfers reveal a dead device."""
        if blames_device(error) or isinstance(error, StreamSkipped):
            self.device_error = error

    def device_works(self) -> None:
        """After a step has run, forget the device error and accept transfers again."""
        self.device_error = None
        self.streams.reset()

    def recover(self) -> list[StepLease]:
        """After a step's error, close all leases and start a new stream epoch. Return the leases."""
        self.stages.flush()
        drained = list(self.leases)
        for lease in drained:
            if lease.masks is not None and not lease.masks.is_made:
                lease.masks.put(None)
        for lease in drained:
            lease.done.synchronize()
            lease.drop()
            del self._open[lease.step]
        self.leases.clear()
        self.last_done = None
        self.streams.reset_steps()
        return drained

    def check_integrity(self, idle: bool = False) -> None:
        """Raise IntegrityError for a lost lease; if `idle`, also for an open lease or a pinned slot in use."""
        lost = [lease for lease in self._open.values() if lease not in self.leases]
        found = [f"lease of step {lease.step} ({_owners(lease)}) was lost: it will never be closed" for lease in lost]
        if idle:
            found += [f"lease of step {lease.step} ({_owners(lease)}) is still open" for lease in self.leases]
            num_taken = self.worker.boundary.num_taken
            if num_taken and not self.leases:
                found.append(f"{num_taken} pinned slots are held, and no step is open")
        raise_problems("engine", found)


def _owners(lease: StepLease) -> str:
    return ", ".join(str(row_id.key) for row_id in lease.work.row_ids)


def _to_host(lease: StepLease, boundary: Boundary) -> HostCopy | None:
    """Begin to copy the results, on the copy stream. Raises the step's first error, which caused the others."""
    for ticket in (lease.computed, lease.sampled):
        if ticket is not None and ticket.error is not None:
            raise ticket.error
    if isinstance(lease.work, Admission):
        return None
    assert lease.sampled is not None
    packed = lease.sampled.result
    assert packed is not None
    return boundary.download(packed, lease)
