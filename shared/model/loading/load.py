"""Load a Model by path or short name: open its files, pick kernels, load weights, warm up."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from shared.config.models.model_folder import read_folder
from shared.config.models.model_path import resolve_head
from shared.config.settings.frozen import ENCODER, LIBRARY
from shared.core.errors import ConfigError
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.code.step_layout import Layout
from shared.kernel.team.team import Team
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.formats import choice
from shared.model.formats.opened import (
    AS_GIVEN,
    DTYPES,
    WINDOW_SLACK,
    EncoderFolder,
    LibraryFolder,
    LoadOptions,
    OpenedModel,
    open_named,
    settled,
)
from shared.model.formats.quantized_folder import open_tensors
from shared.model.llama.eagle_file import HeadFolder
from shared.model.llama.eagle_head import (
    DraftTarget,
    EagleHead,
    EagleWeights,
    HeadNetwork,
    SeparateHead,
    load_eagle_weights,
)
from shared.model.llama.llama import LlamaModel
from shared.model.llama.lora import AdaptedModel, LlamaLike, LoraBank
from shared.model.loading.packed_weights import map_weights
from shared.model.math.config import LlamaConfig
from shared.model.math.draft_head import StackedHead
from shared.model.math.interface import Model, ModelInputs, ModelSpec
from shared.model.math.kernels import Kernels, pick_kernels
from shared.model.math.span import Span
from shared.model.math.weights import IN_BLOCKS, LlamaWeights, load_weights

WARM_PAGE = 8
NOT_DIVIDED = (
    "only models that the library transformers runs are divided among GPUs so far; try --model-library transformers"
)
HOST_CODE = "computes in the host's memory"  # part of an error about HashLM and the scripted model


def load_model(name: str, options: LoadOptions = AS_GIVEN, device: str = "cpu") -> Model:
    """Load smollm2, hashlm, scripted, a .gguf file or a Hugging Face folder. Raises ConfigError."""
    opened = open_named(name, options, device)
    if opened is None:
        if device != "cpu":
            raise ConfigError(f"--device {device}: {name} {HOST_CODE}; use --device cpu")
        return model_of_code(name, options)
    if isinstance(opened, EncoderFolder):
        return load_encoder_model(opened, options, device)
    if isinstance(opened, LibraryFolder):
        from shared.model.library.loading import load_library_model  # imports the library

        refuse_attention(opened, options)
        return load_library_model(opened.path, options, device=device)
    if device == "cpu" or options.memory is not None:
        opened.check_memory(opened.source.config)
    (model,) = build_spans(opened, torch.device(device), [None])
    if device == "cpu":
        warm_up(model)
    return model


def refuse_attention(folder: LibraryFolder, options: LoadOptions) -> None:
    """Raise ConfigError if another attention than Baton's is asked for."""
    is_asked = options.attention is not None and options.attention.is_asked
    LIBRARY.refuse({"--attention": is_asked}, of=choice.described(read_folder(folder.path)))


def check_model(name: str, options: LoadOptions, *, num_stages: int = 1, is_divided: bool = False) -> None:
    """Raise ConfigError for a model that `load_model`, stages or ranks would refuse by its config.json or headers."""
    opened = open_named(name, options)
    if not isinstance(opened, LibraryFolder):
        return
    from shared.model.library.loading import checked_config, refuse_flags  # imports the library

    folder = read_folder(opened.path)
    LIBRARY.refuse({f"--pp {num_stages}": num_stages > 1}, of=choice.described(folder))
    refuse_flags(folder, options, is_divided=is_divided)
    checked_config(folder)
    open_tensors(opened.path)


def why_on_cpu(name: str, options: LoadOptions = AS_GIVEN) -> str:
    """Return why this model and its drafters need a CPU, or "" if they don't. Loads no weights. Raises ConfigError."""
    opened = open_named(name, options)
    if opened is None:
        return f"{name} {HOST_CODE}"
    return ENCODER.sentence("--device", of=opened.path.name) if isinstance(opened, EncoderFolder) else ""


def why_not_on_gpus(name: str, options: LoadOptions = AS_GIVEN) -> str:
    """Return why --tp can't divide this model among GPUs, or "" if it can. Loads no weights. Raises ConfigError."""
    return "" if isinstance(open_named(name, options), LibraryFolder) else NOT_DIVIDED


def model_of_code(name: str, options: LoadOptions) -> Model:
    from shared.model.hashlm.model import HashLM  # only when needed
    from shared.model.scripted import ScriptedLM

    if name == "scripted":
        return ScriptedLM(options.max_context)
    return HashLM(max_context=options.max_context, adapters=options.path_adapters(), num_spare=options.lora_slots)


def load_encoder_model(folder: EncoderFolder, options: LoadOptions, device: str) -> Model:
    """Load T5, the only family with an encoder, in plain torch. Raises ConfigError for unsupported options."""
    from shared.model.encoder.t5_file import load_t5, t5_bytes  # only when needed

    path, formats = folder.path, options.formats
    asked = {
        "--lora": bool(options.adapters),
        "--lora-dir": bool(options.lora_slots),
        "--kv-dtype": formats.kv != "auto",
        "--weight-dtype": formats.weights != "auto",
        f"--device {device}": device != "cpu",
    }
    ENCODER.refuse(asked, of=path.name)
    dtype = DTYPES[settled(options).dtype]
    options.check_memory(t5_bytes(path, dtype))
    return load_t5(path, options.max_context, dtype)


def build_spans(opened: OpenedModel, device: torch.device, spans: Sequence[Span | None]) -> list[LlamaLike]:
    """Build one model per span, with its own kernels, from the same loaded weights.

    The models can run at the same time, because no product belongs to two spans.
    """
    config = opened.source.config
    picked = [opened.pick_kernels(config, device) for _ in spans]
    make, dtype = picked[0], opened.dtype
    spec, as_program = opened.spec(make.attention, device), opened.options.kernels == "auto"
    form, packed = opened.options.formats.weights, map_weights(opened, make, spec.weights_hash)
    weights = load_weights(
        opened.source, dtype, device, opened.num_positions, make.make_weight, make.make_head, form, packed,
        make.groups_experts,
    )  # fmt: skip
    num_spare = opened.options.lora_slots
    bank = LoraBank(opened.folders.values(), num_spare, config, dtype, device, make.make_linear)
    return [
        assemble(config, spec, weights, own, bank, as_program, span) for own, span in zip(picked, spans, strict=True)
    ]


def assemble(
    config: LlamaConfig,
    spec: ModelSpec,
    weights: LlamaWeights,
    picked: Kernels,
    bank: LoraBank,
    as_program: bool,
    span: Span | None,
) -> LlamaLike:
    """Make a model, as a compiled program if possible. `span` None: all layers."""
    attention = picked.make_attention(weights.rope, weights.local_rope)
    model = LlamaModel(config, spec, weights, attention, picked.blocks, bank.adapters, span=span)
    if picked.team is not None and as_program:
        from shared.model.llama.llama_compiled import CompiledLlama, obstacle

        reason = obstacle(config, weights)
        if reason is None:
            program = CompiledLlama(config, spec, weights, picked.team, span)
            return AdaptedModel(program, model, bank) if bank.adapters else program
        logging.getLogger(__name__).info("a step runs kernel by kernel, not as one compiled program: %s", reason)
    return AdaptedModel(model, model, bank) if bank.num_spare else model


def warm_up(model: Model) -> None:
    """Run two tiny steps, so that no request waits for kernels to compile or load."""
    planes = model.kv_planes(WARM_PAGE)
    pool, num_groups = KVPool(planes, 2, WARM_PAGE), len(page_windows(planes))
    with torch.inference_mode():
        for count in (1, WARM_PAGE):
            inputs = ModelInputs(
                input_ids=torch.zeros(count, dtype=torch.int64),
                positions=torch.arange(count),
                layout=Layout(
                    cu_q_lens=torch.tensor([0, count], dtype=torch.int32),
                    page_tables=(torch.ones(1, 1, dtype=torch.int32),) * num_groups,
                    max_q_len=count,
                    max_seq_len=count,
                ),
                logits_idx=torch.arange(count),
            )
            model.forward(inputs, pool)
    pool.close()


def load_mtp_heads(name: str, model: Model) -> Sequence[StackedHead]:
    """Load the MTP layers of the model at `name`, one head for each. Raises ConfigError if it has none."""
    if not model.spec.library:
        raise ConfigError(
            f"--spec mtp: {name} has no MTP layers; models that the library transformers runs may have some. "
            "Use --spec ngram, eagle or none"
        )
    from shared.model.library.model import LibraryModel  # imports the library
    from shared.model.library.mtp_loading import load_mtp_heads

    assert isinstance(model, LibraryModel)
    return load_mtp_heads(model)


def load_eagle_head(
    name: str, model: str, target: DraftTarget, *, team: Team | None = None, kernels: str = "auto"
) -> EagleHead:
    """Load a draft head's folder. Raises ConfigError.

    If `name` is "auto", load the head shipped for `model`, the target's name. Device, dtype, embedding and context are
    the target's. `team` (default: one thread) and `kernels`: as in LoadOptions.
    """
    source = HeadFolder(resolve_head(name, model), target.config)
    layer, embed = source.config.layer, target.embed
    picked = pick_kernels(layer, embed.dtype, embed.device, team or Team(), kernels)
    context = target.spec.max_context + WINDOW_SLACK
    in_blocks = target.spec.weight_dtype in IN_BLOCKS
    weights = load_eagle_weights(source, embed, context, picked.make_weight, picked.make_head, in_blocks)
    network = _head_network(layer, weights, picked, as_program=kernels == "auto")
    head = EagleHead(source, embed, network)
    if embed.device.type == "cpu":
        warm_up_head(head)
    return head


def _head_network(config: LlamaConfig, weights: EagleWeights, picked: Kernels, as_program: bool) -> HeadNetwork:
    if picked.team is not None and as_program:
        from shared.model.llama.eagle_compiled import CompiledHead, fits

        if fits(config, weights):
            return CompiledHead(config, weights, picked.team)
    return SeparateHead(weights, picked.make_attention(weights.rope, None), picked.blocks)


def warm_up_head(head: EagleHead) -> None:
    pool = KVPool(head.kv_planes(WARM_PAGE), 2, WARM_PAGE)
    with torch.inference_mode():
        for count in (1, WARM_PAGE):
            cu_q_lens, table = torch.tensor([0, count], dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
            view = AttentionInputs(torch.arange(count), Layout(cu_q_lens, (table,), count, count))
            ids, features = torch.zeros(count, dtype=torch.int64), torch.zeros(count, head.hidden_size)
            aux = features.repeat(1, len(head.aux_layers)).to(head.dtype)
            head.extend(ids, aux, view, pool)
            head.forward(ids, features, view, pool)
    pool.close()
