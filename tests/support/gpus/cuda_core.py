"""A node's core with a tiny real network in float32: on the CPU, or on the virtual GPU by the streams, events and
copies of the CUDA backend. Imports no numba, which a GPU's node does without; jobs are in cuda_jobs.py."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shared.config.models.vocab_bytes import Vocabulary
from shared.config.models.vocabulary import hashlm_vocabulary
from shared.device.cpu import do_nothing
from shared.device.streams import make_streams
from shared.engine.boundary import PinnedCopies
from shared.engine.drafter import Drafter
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.grammars import NO_GRAMMARS, Grammars
from shared.kernel.attention.flash_infer import LibraryAttention
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_eagle_head, load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.assembly.graph_spec import GraphSpec, why_not_captured
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings
from shared.speculation.copying import CopyingDrafter
from shared.speculation.eagle import EagleWorkerV2
from shared.speculation.ngram import NgramWorkerV2
from tests.support.models import tiny_families
from tests.support.models.draft_head import VOCAB, head_config, head_tensors, save_head, save_target
from tests.support.models.tiny_adapters import adapter

if TYPE_CHECKING:
    from tests.support.virtual_gpu.device import VirtualGpu

TARGET_LAYERS = 3  # as many as a head reads
ADAPTERS = ("one", "other")


@dataclass(frozen=True)
class Kind:
    """What is served, and how it is drafted."""

    family: str = "draft target"  # or one of tiny_families
    spec: str = "none"  # none, ngram, chain, tree, copies
    kv: str = "auto"
    weights: str = "auto"
    exact: bool = False  # host lengths are exact: the loop waits for publish
    mix: bool = True
    cache: bool = False  # prefixes are kept
    siblings: bool = False  # several sequences of one request
    adapters: bool = False
    grammars: bool = False
    layer_ends: tuple[int, ...] = ()  # hand-offs travel in parts
    flashinfer: bool = False  # computes attention on the GPU: see fake_flashinfer.py
    library: bool = False  # `family` is one of library_families, which transformers runs
    dtype: str = "float32"

    @property
    def width(self) -> int:
        return {"none": 1, "ngram": 4, "chain": 4, "tree": 6, "copies": 4}[self.spec]


KINDS = {
    "plain": Kind(),
    "alternating": Kind(mix=False, siblings=True, cache=True),
    "n-gram": Kind(spec="ngram"),
    "chain": Kind(spec="chain"),
    "tree": Kind(spec="tree"),
    "copies": Kind(spec="copies"),
    "exact lengths": Kind(spec="ngram", exact=True),
    "int8 KV": Kind(kv="int8", cache=True),
    "fp8 KV": Kind(kv="fp8", weights="fp8"),
    "adapters": Kind(adapters=True, siblings=True),
    "grammars": Kind(grammars=True, siblings=True, cache=True),
    "grammars, n-gram": Kind(grammars=True, spec="ngram"),
    "grammars, chain": Kind(grammars=True, spec="chain"),
    "grammars, tree": Kind(grammars=True, spec="tree"),
    "adapters, tree": Kind(adapters=True, spec="tree"),
}


def new_folder() -> Path:
    """Make a temporary folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="baton-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def folder_of(family: str, library: bool = False) -> Path:
    """Made once a process."""
    folder = new_folder()
    if library:
        from tests.support.models import library_families  # imports transformers

        library_families.save(family, folder)
    elif family == "draft target":
        save_target(folder, layers=TARGET_LAYERS)
    elif family == "head":
        save_head(folder, head_tensors(), head_config())
    else:
        tiny_families.save(family, folder)
    return folder


@cache
def adapters_of(family: str) -> dict[str, str]:
    """Folders by name."""
    folder = new_folder()
    return {name: str(adapter(folder_of(family), folder / name, seed)) for seed, name in enumerate(ADAPTERS)}


def vocabulary() -> Vocabulary:
    """HashLM's, and one id that stands for nothing."""
    chars = hashlm_vocabulary()
    return Vocabulary((*chars.tokens, b""), chars.eos_ids, chars.special_ids)


def make_core(
    kind: Kind,
    gpu: VirtualGpu | None = None,
    *,
    shared_memory: bool = False,
    kernels: str = "torch",
    graphs: bool = False,
    chunk_size: int = 16,
    max_running: int = 8,
    prompts: tuple[int, ...] = (8, 24),
) -> NodeCore:
    """On the CPU, inline, where there is no `gpu`. `shared_memory`: of its pool, on the CPU. `kernels`: as of
    LoadOptions. `graphs`: steps are captured: of up to `max_running` decode rows, and of `prompts` prompt tokens."""
    device = "cpu" if gpu is None else str(gpu.device)
    formats = Formats(kv=kind.kv, weights=kind.weights)
    adapters = adapters_of(kind.family) if kind.adapters else {}
    attention = LibraryAttention("0.7.4", gpu, is_asked=True) if kind.flashinfer and gpu is not None else None
    options = LoadOptions(
        kind.dtype, kernels=kernels, formats=formats, adapters=adapters, attention=attention,
        library="transformers" if kind.library else "baton",
    )  # fmt: skip
    model = load_model(str(folder_of(kind.family, kind.library)), options, device)
    settings = SchedSettings(
        16, 128, chunk_size=chunk_size, mixed_chunk_size=chunk_size, width=kind.width, mix=kind.mix, device=device,
        needs_cpu_seq_lens=kind.exact, layer_ends=kind.layer_ends,
    )  # fmt: skip
    sizes = CoreSizes(60, max_running, prefix_cache=kind.cache, shared_memory=shared_memory)
    how = {"drafter": _drafter(kind, model, kernels), "grammars": _grammars() if kind.grammars else NO_GRAMMARS}
    if gpu is None:
        return assemble_core(model, make_streams("inline"), settings, sizes, **how)
    boundary = PinnedCopies(gpu.device, lambda size: gpu.pinned((size,), torch.uint8))
    refused = why_not_captured(model.spec, gpu)
    if model.spec.needs_cpu_seq_lens or (kind.library and model.gathers):  # type: ignore[attr-defined]
        prompts = ()  # as `graphs_of` says
    spec = GraphSpec(gpu, (kind.width,), settings.history_len, prompts, refused) if graphs else None
    return assemble_core(model, make_streams("cuda", gpu=gpu), settings, sizes, boundary=boundary, graphs=spec, **how)


def _grammars() -> Grammars:
    known = vocabulary()
    return Grammars(GrammarCompiler(known), known.eos_ids, do_nothing)


def _drafter(kind: Kind, model: Model, kernels: str) -> Drafter | None:
    if kind.spec == "none":
        return None
    if kind.spec == "ngram":
        return NgramWorkerV2()
    target = str(folder_of(kind.family))
    head = load_eagle_head(str(folder_of("head")), target, model, kernels=kernels)  # type: ignore[arg-type]
    model.capture_aux(head.aux_layers)  # type: ignore[attr-defined]
    worker = EagleWorkerV2(head, VOCAB, *((2, 3) if kind.spec == "tree" else (1, 1)))
    return CopyingDrafter(worker, 2) if kind.spec == "copies" else worker
