"""A node's core with a tiny real network in float32: on the CPU, or on the virtual GPU by the streams, events and copies
of the CUDA backend."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.engine.boundary import PinnedCopies
from shared.engine.drafter import Drafter
from shared.model.interface import Model
from shared.model.kernels import Formats
from shared.model.load import load_eagle_head, load_model
from shared.model.opened import LoadOptions
from shared.node.assemble import CoreSizes, assemble_core
from shared.node.core import NodeCore
from shared.sched.settings import SchedSettings
from shared.speculation.copying import CopyingDrafter
from shared.speculation.eagle import EagleWorkerV2
from shared.speculation.ngram import NgramWorkerV2
from tests.support import tiny_families
from tests.support.core_rig import Job
from tests.support.draft_head import VOCAB, head_config, head_tensors, save_head, save_target
from tests.support.virtual_gpu.device import VirtualGpu

TOKENS = 12
SAMPLINGS = (
    SamplingParams(TOKENS, temperature=0.0),
    SamplingParams(TOKENS, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=2),
    SamplingParams(TOKENS, temperature=0.8, top_p=0.9, presence_penalty=0.5, logit_bias=((7, 2.0),)),
    SamplingParams(TOKENS, temperature=0.7, top_k=9, bad_words=((3,), (5, 6)), min_tokens=6, stop_token_ids=(11, 12)),
)


@dataclass(frozen=True)
class Kind:
    """What is served, and how it is drafted."""

    family: str = "draft target"  # or one of tiny_families
    spec: str = "none"  # none, ngram, chain, tree, copies
    kv: str = "auto"
    exact: bool = False  # host lengths are exact: the loop waits for publish
    mix: bool = True
    layer_ends: tuple[int, ...] = ()  # hand-offs travel in parts

    @property
    def width(self) -> int:
        return {"none": 1, "ngram": 4, "chain": 4, "tree": 6, "copies": 4}[self.spec]


@cache
def folder_of(family: str) -> Path:
    """Made once a process."""
    folder = Path(tempfile.mkdtemp(prefix="baton-test-"))
    if family == "draft target":
        save_target(folder)
    elif family == "head":
        save_head(folder, head_tensors(), head_config())
    else:
        tiny_families.save(family, folder)
    return folder


def jobs(count: int = 6) -> list[Job]:
    draw = torch.Generator().manual_seed(3)
    lengths = (1, 15, 16, 30, 33, 7)
    prompts = [torch.randint(0, VOCAB, (lengths[n % 6],), generator=draw).tolist() for n in range(count)]
    return [Job(rid, tuple(prompt), SAMPLINGS[rid % len(SAMPLINGS)], rid) for rid, prompt in enumerate(prompts)]


def make_core(kind: Kind, gpu: VirtualGpu | None = None, *, shared_memory: bool = False) -> NodeCore:
    """On the CPU by plain kernels, inline, where there is no `gpu`. `shared_memory`: of its pool, on the CPU."""
    device = "cpu" if gpu is None else str(gpu.device)
    options = LoadOptions("float32", kernels="torch", formats=Formats(kv=kind.kv))
    model = load_model(str(folder_of(kind.family)), options, device)
    drafter = _drafter(kind, model)
    settings = SchedSettings(
        16, 128, chunk_size=16, mixed_chunk_size=16, width=kind.width, mix=kind.mix, device=device,
        needs_cpu_seq_lens=kind.exact, layer_ends=kind.layer_ends,
    )  # fmt: skip
    sizes = CoreSizes(60, 8, prefix_cache=False, shared_memory=shared_memory)
    if gpu is None:
        return assemble_core(model, make_streams("inline"), settings, sizes, drafter=drafter)
    boundary = PinnedCopies(gpu.device, lambda size: gpu.pinned((size,), torch.uint8))
    return assemble_core(model, make_streams("cuda", gpu=gpu), settings, sizes, drafter=drafter, boundary=boundary)


def _drafter(kind: Kind, model: Model) -> Drafter | None:
    if kind.spec == "none":
        return None
    if kind.spec == "ngram":
        return NgramWorkerV2()
    target = str(folder_of("draft target"))
    head = load_eagle_head(str(folder_of("head")), target, model, kernels="torch")  # type: ignore[arg-type]
    model.capture_aux(head.aux_layers)  # type: ignore[attr-defined]
    worker = EagleWorkerV2(head, VOCAB, *((2, 3) if kind.spec == "tree" else (1, 1)))
    return CopyingDrafter(worker, 2) if kind.spec == "copies" else worker
