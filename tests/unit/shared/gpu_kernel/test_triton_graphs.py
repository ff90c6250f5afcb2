"""Triton's kernels in graphs: interpreted on the virtual GPU, and replayed there by the engine's own runner."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shared.core.sampling_params import SamplingParams
from tests.support.cores.core_rig import assert_whole, run_local
from tests.support.gpus.cuda_core import KINDS, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.virtual_gpu.device import VirtualGpu, make_device

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
launcher = interpreter.kernels("launch.launcher")
from tests.support.virtual_gpu.kernels import kernels_on  # noqa: E402

WAYS = (SamplingParams(4, temperature=0.8), SamplingParams(5, temperature=0.7, top_k=9, top_p=0.8))
OF_A_STEP = {
    "prepare_kernel", "places_kernel", "rope_write_kernel", "attend_split_kernel", "attend_chunks_kernel",
    "add_norm_kernel", "gate_kernel",
    "largest_kernel", "draw_kernel", "spread_kernel", "gather_kernel", "choose_filtered_kernel", "choose_kernel",
}  # fmt: skip


@pytest.fixture(params=["eager", "deferring"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualGpu]:
    """One program draws a row: a tiny vocabulary is one block."""
    monkeypatch.setattr(interpreter.kernels("sample"), "splits_of", lambda num_rows: 1)
    yield make_device(request.param, seed=5, sanitize=False)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("n-gram", "chain", "tree", "int8 KV")),
    ],
)
def test_graphs_of_kernels_have_the_reference_s_streams(name: str, gpu: VirtualGpu) -> None:
    """Two rows and their prompts, in graphs of one and two rows, of 8 and 24 prompt tokens: captured, padded, replayed.
    No capture compiled anything, for each shape runs once before."""
    kind = KINDS[name]
    asked = [replace(job, sampling=way) for job, way in zip(jobs_for(kind, (), 2), WAYS, strict=True)]
    plain = make_core(kind, gpu)
    expected = run_local(plain, asked, rng=random.Random(1))
    plain.close()
    with kernels_on(gpu), launcher.recorded() as seen:
        core = make_core(kind, gpu, kernels="triton", graphs=True, max_running=2)
        with gpu.counting() as counts:
            outcome = run_local(core, asked, rng=random.Random(1))
    assert_whole(core)
    runner = core.graphs
    assert runner is not None
    core.close()
    assert outcome.streams == expected.streams
    assert runner.graphed - runner.graphed_prompts > 2 and runner.graphed_prompts and set(runner.eager) <= {"mixed"}
    assert counts.replays == runner.graphed and counts.syncs == 0
    assert {signature.kernel.split(":")[1] for signature in seen} >= OF_A_STEP
