"""What a step's lease keeps on the CUDA path, and until when. The device stands still while the host goes on, and is
then let go in the worst order: all of one stream before the other."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

from shared.device.cuda import CudaStream
from shared.device.events import Event
from shared.device.streams import make_streams
from shared.engine.boundary import PinnedCopies
from shared.engine.lease import StepLease
from shared.engine.masks import HostDrafts, StepDrafts
from shared.engine.plan import Admission, StepPlan
from shared.engine.verify import Drafts
from shared.sample.interface import TokenMasks
from tests.support.cores.core_rig import assert_whole, run_local
from tests.support.cores.step_faults import break_at
from tests.support.gpus.cuda_core import KINDS, Kind, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import VirtualGpu, VirtualStream, make_device

PATIENCE = 9  # rounds of the loop, within which one token must come


def lazy() -> VirtualGpu:
    return make_device("deferring", seed=3, laziness=1.0)


def boundary_of(gpu: VirtualGpu) -> PinnedCopies:
    return PinnedCopies(gpu.device, lambda size: gpu.pinned((size,), torch.uint8))


def queue_of(stream: object) -> VirtualStream:
    assert isinstance(stream, CudaStream) and isinstance(stream.cuda_stream, VirtualStream)
    return stream.cuda_stream


def lease_of(step: int) -> StepLease:
    none = np.zeros(0, np.int64)
    return StepLease(step, Admission(step, (), none, none, none, {}, ()), None)


def fill_up(gpu: VirtualGpu, num_bytes: int) -> None:
    """Take the memory that has been freed on the current stream."""
    gc.collect()
    for _ in range(4):
        torch.zeros(num_bytes, dtype=torch.uint8, device=gpu.device)


def test_a_slot_is_not_written_before_the_device_has_read_it() -> None:
    gpu = lazy()
    boundary, streams, leases = boundary_of(gpu), make_streams("cuda", gpu=gpu), [lease_of(1), lease_of(2)]
    with gpu.held():
        sent = [
            streams.forward.launch(lambda n=n: boundary.upload({"ids": np.arange(n, n + 4)}, leases[n])["ids"] + 0)
            for n in range(2)
        ]
    assert [ticket.take(HANG_GUARD_S).cpu().tolist() for ticket in sent] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    streams.stop()
    assert not gpu.races


def test_drafts_live_until_they_lie_on_the_host() -> None:
    """Another stream copies them than the one that they were made on, which may use their memory again at once."""
    gpu, lease = lazy(), lease_of(1)
    boundary, streams = boundary_of(gpu), make_streams("cuda", gpu=gpu)
    drafts = lease.drafts = StepDrafts(Event("drafted"))
    ids = torch.arange(6, device=gpu.device).view(2, 3)
    gpu.synchronize(gpu.device)
    with gpu.held():
        streams.forward.launch(lambda: drafts.pack(Drafts(ids), boundary), fires=[drafts.made])
        streams.copy.wait(drafts.made)
        drafts.copy = streams.copy.launch(lambda: drafts.download(boundary, lease))
        streams.forward.launch(lambda: fill_up(gpu, ids.numel() * 8))
        gpu.run(queue_of(streams.forward))
    drafts.copy.done.synchronize(HANG_GUARD_S)
    told = drafts.on_host()
    assert told is not None and told.ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    lease.drop()
    assert lease.drafts is None
    streams.stop()
    assert not gpu.races


def test_results_live_until_they_lie_on_the_host() -> None:
    """A whole step, whose packed results the forward stream's next work would like to have the memory of."""
    gpu, kind = lazy(), Kind()
    core, expected = make_core(kind, gpu), make_core(kind)
    asked = jobs_for(kind, (), 1)
    for one in (core, expected):
        one.scheduler.intake.submit(asked[0].request())
    with gpu.held():
        core.loop.step()
        core.streams.forward.launch(lambda: fill_up(gpu, 4096))
        gpu.run(queue_of(core.streams.forward))
    (lease,) = core.engine.leases
    assert lease.result is not None and lease.result.error is None
    told = []
    for one in (core, expected):
        (request,) = one.scheduler.queues.requests.values()
        for _ in range(PATIENCE):
            if not request.output_ids:
                one.loop.step(block=True)
        told.append(request.output_ids[:1])
    assert told[0] == told[1] != []
    for one in (core, expected):
        one.streams.stop()
        one.close()
    assert not gpu.races


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("plain", "forward"),
        pytest.param("plain", "copy", marks=pytest.mark.long),
        pytest.param("grammars, n-gram", "sample", marks=pytest.mark.long),
    ],
)
def test_slots_of_a_failed_step_are_free_when_the_device_is_done(name: str, place: str) -> None:
    """The steps under way are drained first. Requests of other steps have the CPU's streams."""
    gpu, kind = make_device("deferring", seed=5, laziness=1.0), KINDS[name]
    core = make_core(kind, gpu)
    raised, asked = break_at(core, place, 3), jobs_for(kind, ())
    outcome = run_local(core, asked, rng=random.Random(1))
    assert raised() == core.loop.num_failed_steps == 1
    failed = {rid for rid, end in outcome.ends.items() if end.error is not None}
    plain = make_core(kind)
    expected = run_local(plain, asked, rng=random.Random(1)).streams
    for rid, stream in expected.items():
        assert outcome.streams[rid] == (stream[: len(outcome.streams[rid])] if rid in failed else stream)
    assert len(failed) < len(expected)
    for one in (core, plain):
        assert_whole(one)
        one.close()
    assert not gpu.races


def test_slots_are_used_again() -> None:
    """A core has as many as it has open leases, however long it runs."""
    gpu, kind = make_device("eager"), Kind()
    core = make_core(kind, gpu)
    boundary = core.engine.worker.boundary
    assert isinstance(boundary, PinnedCopies)
    outcome = run_local(core, jobs_for(kind, (), 2), rng=random.Random(1))
    most = 1 + core.settings.depth
    assert outcome.num_steps > 2 * most
    assert 0 < len(boundary._into._free) <= most and 0 < len(boundary._out._free) <= most
    core.close()


def test_drafts_come_to_the_host_when_they_are_drafted() -> None:
    """Of a step with grammars: the host waits for the copy, and the copy for the drafter."""
    gpu, kind = lazy(), KINDS["grammars, n-gram"]
    core, told = make_core(kind, gpu), list[bool]()
    asked = [job for job in jobs_for(kind, (), 2) if job.sampling.grammar]
    make = core.scheduler.masks.make

    def heard(plan: StepPlan, drafts: HostDrafts | None) -> TokenMasks:
        told.append(drafts is None or bool(((drafts.ids >= 0) & (drafts.ids < core.spec.vocab_size)).all()))
        return make(plan, drafts)

    core.scheduler.masks.make = heard  # type: ignore[method-assign]
    outcome = run_local(core, asked, rng=random.Random(1))
    assert all(told) and len(told) == outcome.num_steps
    plain = make_core(kind)
    assert outcome.streams == run_local(plain, asked, rng=random.Random(1)).streams
    for one in (core, plain):
        one.close()
    assert not gpu.races


def test_results_are_read_when_they_lie_on_the_host() -> None:
    """The loop asks while the device stands still, and is told to wait."""
    gpu, kind = lazy(), Kind()
    core = make_core(kind, gpu)
    (job,) = jobs_for(kind, (), 1)
    with gpu.held():
        core.scheduler.intake.submit(job.request())
        core.loop.step()
        (lease,) = core.engine.leases
        assert not lease.has_ended
    while not core.loop.idle or core.queues.requests:
        core.loop.step(block=True)
    assert_whole(core)
    core.close()
    assert not gpu.races


def test_a_core_begins_when_its_memory_is_made() -> None:
    """Weights, pool and relay are written on another stream than the first step's."""
    gpu = lazy()
    core = make_core(Kind(), gpu)
    with gpu.held():
        relay = core.streams.forward.launch(lambda: core.engine.future_map.written_by + 0)
        gpu.run(queue_of(core.streams.forward))
    assert relay.error is None and relay.take(HANG_GUARD_S).tolist() == [-1] * core.engine.future_map.num_rows
    core.streams.stop()
    core.close()
    assert not gpu.races
