"""Choose a node's device, and load its model, drafter and grammars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shared.config.models.vocab_bytes import Vocabulary
from shared.config.models.vocabulary import read_vocabulary
from shared.config.processes import WITHOUT_GPU, NodeParts, check_parts_on_gpu
from shared.core.errors import ConfigError
from shared.device.gpu import Gpu, MemoryInfo
from shared.device.group import RankGroup
from shared.device.malloc import give_freed_memory_back
from shared.device.torch_cuda import TorchCuda
from shared.engine.drafter import Drafter
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.grammars import Grammars, NoGrammars
from shared.model.formats.opened import LoadOptions
from shared.model.formats.packed_folder import PackedFolder, packed_of
from shared.model.loading.load import load_model, why_not_on_gpus, why_on_cpu
from shared.model.math.interface import Model, ModelSpec, Stage
from shared.model.math.kernels import Formats
from shared.node.assembly.attention_choice import library_attention
from shared.node.assembly.gpu_memory import TOO_LARGE, explained
from shared.node.machine.cores import NodeCores
from shared.observe.log import Logger
from shared.speculation.drafters import make_drafter

NO_GPU = (
    "torch sees no GPU: none is there, its driver is missing, CUDA_VISIBLE_DEVICES hides it, or this torch was built "
    "for CPUs"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Model
    drafter: Drafter | None
    stages: tuple[Stage, ...] = ()
    packed: PackedFolder | None = None

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes of mapped weights, which the system counts as free memory."""
        stored = self.model.spec.stored
        own = 0 if stored is None else stored.mapped_bytes
        return own + (0 if self.packed is None else self.packed.mapped_bytes)


def devices(parts: NodeParts, gpu: Gpu, log: Logger) -> tuple[str, str]:
    """Return the device and the kind of streams. Raise ConfigError as `why_no_gpu`."""
    if parts.sched.device in WITHOUT_GPU:
        return "cpu", parts.sched.device
    why = why_no_gpu(parts, gpu)
    if why and gpu.is_available():
        log.info("the GPU is not used", why=why)
    device = "cpu" if why else "cuda"
    return device, device


def why_no_gpu(parts: NodeParts, gpu: Gpu) -> str:
    """Return why a node with --device auto or cuda computes on the CPU; "" if it uses the GPU.

    Raise ConfigError if the GPU that --device cuda asks for is missing, and for ranks or stages that can't use a GPU
    beside one that the model could use. `load` refuses --device cuda for a model that can't use a GPU.
    """
    device = parts.sched.device
    if not gpu.is_available():
        if device == "cuda":
            raise ConfigError(f"--device cuda: {NO_GPU}; use --device cpu or auto")
        return NO_GPU
    if device == "auto" and (why := why_on_cpu(parts.model.model, load_options(parts))):
        return why
    check_parts_on_gpu(parts.parallel, device)
    if parts.parallel.tp > 1:
        check_ranks_on_gpus(parts, gpu)
    return ""


def check_ranks_on_gpus(parts: NodeParts, gpu: Gpu) -> None:
    """Raise ConfigError for a node that can't divide its model among GPUs."""
    given = f"--tp {parts.parallel.tp} --device {parts.sched.device}"
    if why := why_not_on_gpus(parts.model.model, load_options(parts)):
        raise ConfigError(f"{given}: {why}, or say --device cpu")
    if (num_gpus := gpu.device_count()) < parts.parallel.tp:
        raise ConfigError(f"{given}: each rank needs a GPU of its own, and this process sees only {num_gpus}")


def gpu_of(streams: str) -> Gpu | None:
    return TorchCuda() if streams == "cuda" else None


def load(parts: NodeParts, device: str, cores: NodeCores, group: RankGroup | None, gpu: Gpu | None) -> Loaded:
    """Only rank 0 makes drafts. In a pipeline, the drafter runs on the first stage's stream."""
    memory = gpu.memory_info(torch.device(device)) if gpu is not None else None
    name = parts.model.model
    options = replace(load_options(parts, cores, memory), attention=library_attention(parts, gpu))
    model: Model
    stages: tuple[Stage, ...] = ()
    if group is not None:
        from shared.model.loading.shard import load_shard  # a late import, because the module imports the CPU's kernels

        with explained(gpu, device, TOO_LARGE):
            model = load_shard(name, options, group, device)
    elif (num_stages := parts.parallel.pp) > 1:
        from shared.model.loading.pipeline import load_pipeline

        model, stages = load_pipeline(name, options, num_stages, heads_every_row=parts.node.role == "decode")
    else:
        with explained(gpu, device, TOO_LARGE):
            model = load_model(name, options, device)
    with explained(gpu, device, TOO_LARGE):
        loaded = Loaded(model, make_drafter(parts.spec, name, model, cores.team), stages, options.packed)
    give_freed_memory_back()
    return loaded


def make_grammars(parts: NodeParts, spec: ModelSpec, log: Logger, notify: Callable[[], None]) -> Grammars | NoGrammars:
    """Clients learn the reason why there are none, so it names no files."""
    why = why_no_grammars(parts, spec)
    if not why:
        try:
            vocabulary = read_vocabulary(parts.model.model)
        except ConfigError as error:
            log.warning("no structured output: the tokenizer can't be read", why=error.message)
            return NoGrammars("the model's tokenizer can't be read (the nodes' logs say why)")
        why = why_unfit(vocabulary, spec)
        if not why:
            return Grammars(GrammarCompiler(vocabulary), vocabulary.eos_ids, notify)
    log.warning("no structured output", why=why)
    return NoGrammars(why)


def why_no_grammars(parts: NodeParts, spec: ModelSpec) -> str:
    """Return why no model of this kind follows grammars on this node; "" if it may."""
    if spec.has_encoder:
        return "models with an encoder have none"
    return "nodes with --pp have none" if parts.parallel.pp > 1 else ""


def why_unfit(vocabulary: Vocabulary, spec: ModelSpec) -> str:
    """Return why no grammar can be compiled for this vocabulary; "" if one can."""
    if not vocabulary.eos_ids:
        return "no token ends this model's answers"
    own, models = len(vocabulary.tokens), spec.vocab_size
    return "" if own == models else f"the model has {models} tokens, and its tokenizer {own}"


def load_options(parts: NodeParts, cores: NodeCores | None = None, memory: MemoryInfo | None = None) -> LoadOptions:
    """Turn the node's settings into options to load its model. `memory`: the memory of the model's GPU."""
    wanted = parts.model
    formats = Formats(kv=wanted.kv_dtype, weights=wanted.weight_dtype)
    kernels = "fixed" if parts.sched.deterministic else "auto"
    packed = packed_of(parts.memory.packed_bytes)
    options = LoadOptions(
        wanted.dtype,
        wanted.max_context,
        adapters=wanted.adapters,
        lora_slots=parts.adapters.num_spare,
        formats=formats,
        packed=packed,
        library=wanted.model_library,
        memory=memory,
        kernels=kernels,
    )
    if cores is None:
        return options
    if parts.parallel.pp > 1:  # stages compute at the same time, each with its own team
        return replace(options, threads=cores.threads)
    return replace(options, team=cores.team)
