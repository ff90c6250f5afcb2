"""Speculation on a tiny real network in float32: streams are those of plain decoding, whatever is drafted.

Random trees that hold the truth must be accepted along it: then the network's KV was brought together rightly, in all
layers. A random EAGLE-3 head, mostly wrong, must change nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.engine.drafter import Drafter
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_eagle_head, load_model
from shared.model.math.kernels import Formats
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings
from shared.speculation.eagle import EagleWorkerV2
from tests.support.cores.core_rig import Job, Outcome, assert_whole, run_local
from tests.support.cores.random_trees import RandomTrees
from tests.support.models.draft_head import VOCAB, head_config, head_tensors, save_head, save_target

SAMPLINGS = (
    SamplingParams(40, temperature=0.0),
    SamplingParams(40, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=0),
    SamplingParams(40, temperature=0.8, top_p=0.9, presence_penalty=0.5),
)
KINDS = {"torch": ("torch", "auto"), "program": ("auto", "auto"), "program, int8 KV": ("auto", "int8")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    save_target(target)
    save_head(head, head_tensors(), head_config())
    return target, head


def make(folders: tuple[Path, Path], kind: str, page_size: int, width: int, drafter: Drafter | str) -> NodeCore:
    target, folder = folders
    kernels, kv = KINDS[kind]
    model = load_model(str(target), LoadOptions("float32", kernels=kernels, formats=Formats(kv)))
    assert getattr(model, "is_program", False) == (kernels == "auto")
    if drafter == "eagle":
        head = load_eagle_head(str(folder), str(target), model, kernels=kernels)  # type: ignore[arg-type]
        model.capture_aux(head.aux_layers)  # type: ignore[attr-defined]
        drafter = EagleWorkerV2(head, VOCAB, topk=2, steps=3)
    settings = SchedSettings(page_size, 128, chunk_size=16, mixed_chunk_size=16, width=width)
    sizes = CoreSizes(60 * 16 // page_size, 8, prefix_cache=False)
    chosen = None if isinstance(drafter, str) else drafter
    return assemble_core(model, make_streams("inline"), settings, sizes, drafter=chosen)


def jobs() -> list[Job]:
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in (1, 15, 16, 30)]
    return [Job(rid, tuple(prompts[rid % 4]), SAMPLINGS[rid % 3], rid) for rid in range(6)]


def run(core: NodeCore, todo: list[Job]) -> Outcome:
    outcome = run_local(core, todo)
    assert_whole(core)
    core.close()
    return outcome


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_a_real_network_are_those_of_plain_decoding(kind: str, folders: tuple[Path, Path]) -> None:
    plain = run(make(folders, kind, 16, 1, "none"), jobs()).streams
    assert all(len(stream) == 40 for stream in plain.values())
    for page_size in (1, 16):
        trees = RandomTrees(jobs(), page_size, plain)
        core = make(folders, kind, page_size, 8, trees)
        process = core.scheduler.process
        core.scheduler.process = lambda result, p=process, t=trees: (t.check(result), p(result))  # type: ignore[method-assign]
        assert run(core, jobs()).streams == plain
        assert trees.num_checked > 30 and trees.num_moved > 10
    assert run(make(folders, kind, 16, 8, "eagle"), jobs()).streams == plain
