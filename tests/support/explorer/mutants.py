"""Broken streams: each mutant takes one event, wait, copy or check away, in process, on the objects of one run.

`scenarios`: where it has something to break. `found_by`: who must find it, apart from luck; the explorer prints how
often each oracle does. A mutant that the stream alone finds (no order is broken) says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from decode_node.handoff_in import HandoffIn
from decode_node.side import DecodeSide
from shared.engine.future_map import FutureIndices
from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan, StepResult
from shared.engine.transfer_jobs import JobDone, TransferJobs
from shared.sched.loop import EngineLoop
from shared.sched.memory.offload import Offload
from shared.sched.steps.events import ChunkReady
from shared.sched.steps.lengths import Lengths
from shared.speculation.multi_layer_eagle import KeptHidden
from tests.support.explorer.cases import Site


@dataclass(frozen=True)
class Broken:
    """A mutant. `takes_away` says in words what a reader of the production code would miss; `script` names the
    hand-written schedule that must fail; `seed` is where a search begins (None: only the script shows it for sure)."""

    name: str
    takes_away: str
    scenarios: tuple[str, ...]
    found_by: tuple[str, ...]
    change: Callable[[Site], None]
    seed: int | None = 0
    script: str = ""

    def apply(self, site: Site) -> None:
        self.change(site)


def no_wait(name: str) -> Callable[[Site], None]:
    """The stream goes on without waiting for events."""

    def change(site: Site) -> None:
        getattr(site.core.streams, name).wait = lambda event: None

    return change


def at_once(jobs: TransferJobs[Any, Any]) -> list[JobDone[Any, Any]]:
    """Instead of TransferJobs.take_done."""
    done = [JobDone(tag, ticket.result, None) for tag, ticket in jobs._open]
    jobs._open.clear()
    return done


def cold_copies_end_at_once(site: Site) -> None:
    """Copies of the cold tier count as done as soon as they were launched."""
    offload = site.core.queues.offload
    assert isinstance(offload, Offload)
    jobs = offload._tier.jobs
    jobs.take_done = lambda: at_once(jobs)  # type: ignore[method-assign]


def pull_waits_for_an_older_step(site: Site) -> None:
    """last_done is the step before the newest."""
    engine = site.core.engine
    launch_copy = engine._launch_copy

    def older(lease: StepLease) -> None:
        before = engine.last_done
        launch_copy(lease)
        engine.last_done = before

    engine._launch_copy = older  # type: ignore[method-assign]


def pull_waits_for_forward_only(site: Site) -> None:
    """A pull does not wait for the sampling closure, whose draft-extend writes pages too."""
    engine = site.core.engine
    launch_copy = engine._launch_copy

    def forward_only(lease: StepLease) -> None:
        launch_copy(lease)
        if lease.forward is not None:
            engine.last_done = lease.forward.done

    engine._launch_copy = forward_only  # type: ignore[method-assign]


def no_publish_wait(site: Site) -> None:
    """Neither the loop nor resolve waits for publish_ready."""
    engine, fm = site.core.engine, site.core.future_map
    engine.newest_publish = lambda: None  # type: ignore[method-assign]
    resolve = fm.resolve_seq_lens_cpu
    fm.resolve_seq_lens_cpu = lambda rows, ready: resolve(rows, None)  # type: ignore[method-assign]


def old_publish(site: Site) -> None:
    """A shared event: the first open lease's instead of the newest one's."""
    engine = site.core.engine
    engine.newest_publish = lambda: (  # type: ignore[method-assign]
        engine.leases[0].publish_ready if len(engine.leases) > 1 else None
    )


def early_publish_ready(site: Site) -> None:
    """publish_ready fires as the forward begins, before verify."""
    worker = site.core.engine.worker
    forward = worker.forward

    def early(plan: StepPlan, lease: StepLease) -> Generator[None, None, None]:
        if lease.publish_ready is not None:
            lease.publish_ready.fire()
        yield from forward(plan, lease)

    worker.forward = early  # type: ignore[method-assign]


def publish_before_verify(site: Site) -> None:
    """The lengths from before the step are published as the lengths after it."""
    worker = site.core.engine.worker
    sample = worker.sample

    def early(plan: StepPlan, lease: StepLease, publish: Callable[[FutureIndices, torch.Tensor], None]) -> Any:
        assert lease.carry is not None
        publish(lease.carry.fb.future, lease.carry.fb.committed)
        return sample(plan, lease, publish)

    worker.sample = early  # type: ignore[method-assign]


def publish_after_extend(site: Site) -> None:
    worker = site.core.engine.worker
    sample = worker.sample

    def late(plan: StepPlan, lease: StepLease, publish: Callable[[FutureIndices, torch.Tensor], None]) -> Any:
        kept: list[tuple[FutureIndices, torch.Tensor]] = []
        packed = yield from sample(plan, lease, lambda *lengths: kept.append(lengths))
        publish(*kept[0])
        return packed

    worker.sample = late  # type: ignore[method-assign]


def live_lengths(site: Site) -> None:
    """The closure reads the batch's lengths when it runs, instead of its plan's (S7)."""
    worker, scheduler = site.core.engine.worker, site.core.scheduler
    forward = worker.forward

    def live(plan: StepPlan, lease: StepLease) -> Generator[None, None, None]:
        running = scheduler.queues.running
        if len(running) == plan.batch_size and plan.num_prefill == 0:
            plan = dataclasses.replace(plan, seq_lens_cpu=running.seq_lens.lo)
        yield from forward(plan, lease)

    worker.forward = live  # type: ignore[method-assign]


def stash_on_another_stream(site: Site) -> None:
    """Every step's relay values are stashed on the copy stream."""
    engine, fm = site.core.engine, site.core.future_map
    stash = fm.stash

    def elsewhere(*args: Any, **extras: Any) -> None:
        engine.streams.copy.launch(lambda: stash(*args, **extras), label="stash")

    fm.stash = elsewhere  # type: ignore[method-assign]


def admission_off_stream(site: Site) -> None:
    """PREBUILT seeds the relay where its pages came in, not on the forward stream."""
    engine = site.core.engine
    admit = engine.admit

    def off_stream(admission: Any) -> StepLease:
        streams = engine.streams
        engine.streams = dataclasses.replace(streams, forward=streams.transfer)
        try:
            return admit(admission)
        finally:
            engine.streams = streams

    engine.admit = off_stream  # type: ignore[method-assign]


def live_batch_rows(site: Site) -> None:
    """The closure reads the scheduler's batch when it runs, instead of its plan."""
    worker, scheduler = site.core.engine.worker, site.core.scheduler
    forward = worker.forward

    def live(plan: StepPlan, lease: StepLease) -> Generator[None, None, None]:
        rows = scheduler.queues.running.req_pool_indices
        if len(rows) == plan.batch_size and plan.num_prefill == 0:
            plan = dataclasses.replace(plan, req_pool_indices=rows)
        yield from forward(plan, lease)

    worker.forward = live  # type: ignore[method-assign]


def live_page_table(site: Site) -> None:
    """The plan carries no copy of its rows' page table: the closure takes it when it runs."""
    worker, rows = site.core.engine.worker, site.core.kv.rows
    forward = worker.forward

    def live(plan: StepPlan, lease: StepLease) -> Generator[None, None, None]:
        layout = dataclasses.replace(plan.layout, page_tables=rows.snapshot(plan.req_pool_indices))
        yield from forward(dataclasses.replace(plan, layout=layout), lease)

    worker.forward = live  # type: ignore[method-assign]


def incarnation_unchecked(site: Site) -> None:
    """Results of an older life of a request count for its present one."""
    scheduler = site.core.scheduler
    process = scheduler.process

    def trusting(result: StepResult) -> None:
        known = [scheduler.queues.requests.get(row_id.key) for row_id in result.row_ids]
        row_ids = [
            row_id if req is None else row_id._replace(incarnation=req.incarnation)
            for row_id, req in zip(result.row_ids, known, strict=True)
        ]
        process(dataclasses.replace(result, row_ids=tuple(row_ids)))

    scheduler.process = trusting  # type: ignore[method-assign]


def result_before_done(site: Site) -> None:
    """The loop collects a lease without asking whether it is done."""

    def eager(loop: EngineLoop) -> bool:
        progressed = False
        while loop.engine.leases:
            result = loop.engine.collect()
            if result is not None:
                loop.scheduler.process(result)
            progressed = True
        return progressed

    site.stack.enter_context(patch.object(EngineLoop, "_process_results", eager))


def installed_before_the_pull(site: Site) -> None:
    """Transfer jobs count as done as soon as they were launched."""
    pulls = _decode_side(site).transfers.copies._jobs
    pulls.take_done = lambda: at_once(pulls)  # type: ignore[method-assign]


def revoked_row_freed_at_once(site: Site) -> None:
    """A revoked grant's row is not held until its pull is over."""
    core, transfers = site.core, _decode_side(site).transfers

    def revoked(key: Any, row: int, now: float) -> HandoffIn | None:
        handoff = transfers.open.pop(key, None)
        core.queues.budget.release_held(row)
        return handoff

    transfers.revoked = revoked  # type: ignore[method-assign]


def described_early(site: Site) -> None:
    """The prefill node describes a chunk when it is planned, not when its step was processed."""
    scheduler = site.nodes[0].ctx.core.scheduler
    advance = scheduler.planner._advance_chunks

    def eager(shares: Any, step: int) -> None:
        advance(shares, step)
        for share in shares:
            if share.chunk.request.handoff_to is not None:
                scheduler.queues.events.append(ChunkReady(share.chunk.request, share.chunk.computed))

    scheduler.planner._advance_chunks = eager  # type: ignore[method-assign]


def short_reservation(site: Site) -> None:
    """Pages are reserved for one step beyond the last result, not for the step in flight too."""
    site.stack.enter_context(patch.object(Lengths, "widen", lambda lengths, rows, width: None))


def cached_page_written(site: Site) -> None:
    """The last token of a cached prefix is computed again, into the cache's page. The values are the same, so no
    stream can show it."""
    budget = site.core.queues.budget
    reserve = budget.reserve

    def one_more(*args: Any) -> int | None:
        cached = reserve(*args)
        return cached - 1 if cached else cached

    budget.reserve = one_more  # type: ignore[method-assign]


def relay_around_the_accessor(site: Site) -> None:
    """A worker that writes the relay's tensor itself."""
    worker, fm = site.core.engine.worker, site.core.future_map
    sample = worker.sample

    def direct(plan: StepPlan, lease: StepLease, publish: Callable[[FutureIndices, torch.Tensor], None]) -> Any:
        packed = yield from sample(plan, lease, publish)
        fm.output_tokens_buf[torch.from_numpy(plan.req_pool_indices)] += 0
        return packed

    worker.sample = direct  # type: ignore[method-assign]


def no_drain(site: Site) -> None:
    """Recovery gives rows and pages back while later steps still run."""
    engine = site.core.engine

    def recover() -> list[StepLease]:
        drained = list(engine.leases)
        engine.leases.clear()
        engine.last_done = None
        for stream in (engine.streams.forward, engine.streams.copy):
            stream.reset()
        return drained

    engine.recover = recover  # type: ignore[method-assign]


def stash_before_extend(site: Site) -> None:
    """The first draft that waits for the next step is an older one."""
    fm = site.core.future_map
    stash = fm.stash
    fm.stash = lambda future, ids, step, **extras: stash(future, ids, step)  # type: ignore[method-assign]


def keep_on_another_stream(site: Site) -> None:
    """MTP layers' hidden states go to their pages on the copy stream."""
    keep, copy = KeptHidden.keep, site.core.streams.copy

    def elsewhere(kept: KeptHidden, hidden: torch.Tensor, layer: int) -> None:
        copy.launch(lambda: keep(kept, hidden, layer), label="keep")

    site.stack.enter_context(patch.object(KeptHidden, "keep", elsewhere))


def _decode_side(site: Site) -> DecodeSide:
    side = site.nodes[1].side
    assert isinstance(side, DecodeSide)
    return side


LOCAL, REAL = ("plain", "spec"), ("real",)
DETECTOR, STREAM, LATENCY, SCRIPT = ("detector",), ("stream", "crash"), ("latency",), ("script",)

MUTANTS = {
    broken.name: broken
    for broken in (
        Broken("no_copy_wait", "copy.wait(sampled)", LOCAL, DETECTOR, no_wait("copy")),
        Broken("no_publish_wait", "host waits for publish_ready", ("lengths",), DETECTOR, no_publish_wait),
        Broken("old_publish_wait", "the NEWEST lease's publish_ready", ("lengths",), DETECTOR, old_publish),
        Broken("publish_fires_early", "publish_ready after the lengths", ("lengths",), DETECTOR, early_publish_ready),
        Broken("publish_before_verify", "publish after verify", ("lengths",), DETECTOR, publish_before_verify),
        Broken("publish_after_extend", "publish before draft-extend", ("lengths",), LATENCY, publish_after_extend),
        Broken("live_lengths", "the plan's own lengths (S7)", ("plain",), DETECTOR, live_lengths),
        Broken("stash_off_stream", "stash on the forward stream", LOCAL, DETECTOR, stash_on_another_stream),
        Broken("admit_off_stream", "admission on the forward stream", ("pair",), DETECTOR, admission_off_stream),
        Broken("live_batch", "the plan's own rows", LOCAL, DETECTOR, live_batch_rows),
        Broken("live_page_table", "the plan's own page table", LOCAL, DETECTOR, live_page_table),
        Broken("incarnation_unchecked", "incarnation of a result", LOCAL, STREAM, incarnation_unchecked, 4),
        Broken("result_before_done", "lease.done.query()", LOCAL, DETECTOR, result_before_done),
        Broken("pull_no_wait", "transfer.wait(newest step)", ("pair",), DETECTOR, no_wait("transfer"), 2, "pulls"),
        Broken("pull_old_wait", "the NEWEST step", ("pair",), DETECTOR, pull_waits_for_an_older_step, 2, "pulls"),
        Broken(
            "pull_forward_wait",
            "the sampling closure of it",
            ("pair",),
            SCRIPT,
            pull_waits_for_forward_only,
            None,
            "pulls",
        ),
        Broken("pull_not_done", "pull.done.query()", ("pair",), DETECTOR, installed_before_the_pull),
        Broken("cold_no_wait", "cold.wait(newest step)", ("cold",), DETECTOR, no_wait("cold"), 5),
        Broken("cold_not_done", "copy.done.query()", ("cold",), DETECTOR, cold_copies_end_at_once),
        Broken("row_not_held", "rows held until the pull is over", ("pair",), DETECTOR, revoked_row_freed_at_once, 1),
        Broken("described_early", "pages described when final", ("pair",), DETECTOR, described_early),
        Broken("short_reservation", "reservation for steps in flight", ("spec",), DETECTOR, short_reservation),
        Broken("cached_page_written", "cached pages are read-only", LOCAL, DETECTOR, cached_page_written, 1),
        Broken("around_accessor", "relay accessors", LOCAL, DETECTOR, relay_around_the_accessor),
        Broken("no_drain", "drain before recovery", ("fault",), SCRIPT, no_drain, None, "drain"),
        Broken("real_publish_late", "publish before draft-extend", REAL, LATENCY, publish_after_extend, 1),
        Broken("real_stash_off_stream", "stash on the forward stream", REAL, DETECTOR, stash_on_another_stream),
        Broken(
            "real_state_off_stream", "MTP states kept on the forward stream", REAL, DETECTOR, keep_on_another_stream
        ),
        Broken("real_draft_not_stashed", "extend before stash", REAL, ("accept",), stash_before_extend),
    )
}
