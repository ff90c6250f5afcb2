"""Streams of a compiled model with KV of bytes: the same however they are cut, drafted, interrupted and handed over."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.engine.drafter import Drafter
from shared.kernel.code.quantized import DTYPES
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.kernels import Formats
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings
from shared.speculation.ngram import NgramWorkerV2
from tests.support.cores.core_pair import CorePair, run_pair
from tests.support.cores.core_rig import Job, assert_whole, run_local
from tests.support.cores.random_trees import RandomTrees
from tests.support.models.draft_head import VOCAB, save_target

SAMPLINGS = (
    SamplingParams(30, temperature=0.0),
    SamplingParams(30, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=0),
    SamplingParams(30, temperature=0.8, top_p=0.9, presence_penalty=0.5),
)
Streams = dict[str, list[int]]


# head_dim; with wide heads int8 keys and values are multiplied as integers
FORMS = {"int8, float32": 16, "fp8, bfloat16": 16, "int8, bfloat16, wide heads": 64}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def target(form: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("target")
    save_target(folder, head_dim=FORMS[form])
    return folder


def jobs() -> list[Job]:
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in (1, 15, 16, 30, 50, 7)]
    return [Job(rid, tuple(tokens), SAMPLINGS[rid % 3], rid) for rid, tokens in enumerate(prompts)]


def make_core(
    target: Path,
    form: str,
    page_size: int = 16,
    chunk_size: int = 16,
    backend: str = "inline",
    drafter: Drafter | None = None,
    width: int = 1,
    threads: int = 1,
) -> NodeCore:
    kv, dtype = form.split(", ")[:2]
    model = load_model(str(target), LoadOptions(dtype, threads=threads, formats=Formats(kv)))
    assert getattr(model, "is_program", False), "the compiled program, not plain torch"
    assert model.kv_planes(page_size)[0].dtype == DTYPES[kv]
    streams = make_streams(backend, on_thread_start=lambda: torch.set_num_threads(1))
    settings = SchedSettings(page_size, 128, chunk_size=chunk_size, mixed_chunk_size=chunk_size, width=width)
    return assemble_core(model, streams, settings, CoreSizes(80 * 16 // page_size, 8), drafter=drafter)


def run(core: NodeCore, retract_every: int = 0) -> Streams:
    outcome = run_local(core, jobs(), retract_every=retract_every, rng=random.Random(3))
    assert_whole(core)
    core.close()
    return outcome.streams


@pytest.fixture(scope="module")
def plain(form: str, target: Path) -> Streams:
    streams = run(make_core(target, form))
    assert len(streams) == 6 and all(len(stream) == 30 for stream in streams.values())
    return streams


@pytest.mark.parametrize(("page_size", "chunk_size", "backend"), [(1, 3, "inline"), (64, 16, "cpu")])
def test_streams_are_the_same_however_they_are_cut(
    page_size: int, chunk_size: int, backend: str, form: str, target: Path, plain: Streams
) -> None:
    core = make_core(target, form, page_size, chunk_size, backend, threads=2 if backend == "cpu" else 1)
    assert run(core, retract_every=7) == plain


def test_drafts_change_no_stream(form: str, target: Path, plain: Streams) -> None:
    assert run(make_core(target, form, drafter=NgramWorkerV2(), width=5), retract_every=11) == plain


@pytest.mark.parametrize("page_size", [1, 16])
def test_nor_do_trees(page_size: int, form: str, target: Path, plain: Streams) -> None:
    """What was accepted moves to its place, its scales with it."""
    trees = RandomTrees(jobs(), page_size, plain)
    core = make_core(target, form, page_size, drafter=trees, width=8)
    process = core.scheduler.process
    core.scheduler.process = lambda result: (trees.check(result), process(result))  # type: ignore[method-assign]
    assert run(core) == plain
    assert trees.num_checked > 30 and trees.num_moved > 10


def test_pages_that_were_handed_over_are_gone_on_with(form: str, target: Path, plain: Streams) -> None:
    pair = CorePair(make_core(target, form, backend="cpu"), make_core(target, form, backend="cpu", threads=2))
    assert run_pair(pair, jobs(), retract_every=9).streams == plain
    pair.close()
