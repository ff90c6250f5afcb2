"""From a path or a short name to a Model. The one place that opens weight files and picks kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch

from shared.config.encoder_decoder import has_encoder
from shared.config.model_path import resolve_head, resolve_model
from shared.core.errors import ConfigError
from shared.kernel.attention import AttentionInputs
from shared.kv.pool import KVPool
from shared.model.config import LlamaConfig
from shared.model.eagle_file import HeadFolder
from shared.model.eagle_head import (
    DraftTarget,
    EagleHead,
    EagleWeights,
    Midlayer,
    SeparateMidlayer,
    load_eagle_weights,
)
from shared.model.gguf_file import GgufFile
from shared.model.interface import AdapterSpec, Model, ModelInputs, ModelSpec
from shared.model.kernels import AS_DTYPE, Formats, Kernels, pick_kernels
from shared.model.llama import LlamaModel
from shared.model.lora import AdaptedModel, Adapter, LlamaLike, load_adapter
from shared.model.lora_file import LoraFolder
from shared.model.safetensors_folder import SafetensorsFolder
from shared.model.span import Span
from shared.model.weights import LlamaWeights, TensorSource, load_weights, weights_bytes

WARM_PAGE = 8
WINDOW_SLACK = 64  # a verify window near the end reaches past the last position that is kept
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    name: str,
    dtype: str = "bfloat16",
    device: str = "cpu",
    *,
    max_context: int = 0,
    threads: int = 1,
    kernels: str = "auto",
    available_bytes: int | None = None,
    adapters: Mapping[str, str] | None = None,
    formats: Formats = AS_DTYPE,
) -> Model:
    """`name`: smollm2, hashlm, a .gguf file or a Hugging Face folder. `max_context` 0 means what the model can.

    `threads` is what the core plan gives this process. `kernels`: "auto", "separate" (each compiled kernel called from
    Python) or "torch" (plain torch only). `available_bytes` bounds the weights; None asks the operating system.
    `adapters`: LoRA folders by the names that clients use. `formats`: of KV and weights, where not the dtype.
    """
    adapters = adapters or {}
    found = resolve_model(name)
    if found.path is None:
        from shared.model.hashlm.model import HashLM  # not before it is asked for

        if formats != AS_DTYPE:
            raise ConfigError(f"--kv-dtype and --weight-dtype are for models of numbers with a point, not {name}")
        own = hashlm_adapters(adapters)
        return HashLM(max_context=max_context, adapters=own) if max_context else HashLM(adapters=own)
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    if has_encoder(found.path):
        return load_encoder_model(found.path, dtype, device, max_context, available, bool(adapters), formats)
    source = open_model(found.path)
    context = context_of(source, max_context)
    if device == "cpu":
        item = None if formats.weights == "auto" else 1
        check_memory(weights_bytes(source.config, DTYPES[dtype], context, item), available)
    folders = open_adapters(adapters, source.config)
    return build_model(source, dtype, torch.device(device), context, threads, kernels, folders, formats)


def load_encoder_model(
    folder: Path, dtype: str, device: str, max_context: int, available: int, has_adapters: bool, formats: Formats
) -> Model:
    """T5, the one family with an encoder, in plain torch. ConfigError names what it can't do yet."""
    from shared.model.t5_file import load_t5, t5_bytes  # not before it is asked for

    asked = {"--lora": has_adapters, "--kv-dtype": formats.kv != "auto", "--weight-dtype": formats.weights != "auto"}
    refused = [flag for flag, is_asked in asked.items() if is_asked]
    if refused:
        raise ConfigError(f"{', '.join(refused)}: not for models with an encoder ({folder.name}) yet; leave it out")
    if device != "cpu":
        raise ConfigError(f"--device {device}: models with an encoder ({folder.name}) run on the CPU only so far")
    check_memory(t5_bytes(folder, DTYPES[dtype]), available)
    return load_t5(folder, max_context, DTYPES[dtype])


def open_model(path: Path) -> TensorSource:
    """Reads headers only."""
    return SafetensorsFolder(path) if path.is_dir() else GgufFile(path)


def check_memory(need: int, available: int) -> None:
    if need > available:
        raise ConfigError(
            f"the weights need {need / 1e9:.2f} GB and {available / 1e9:.2f} GB are free: "
            "take a smaller model, --dtype bfloat16, or close other programs"
        )


def build_model(
    source: TensorSource,
    dtype: str,
    device: torch.device,
    context: int,
    threads: int,
    kernels: str,
    folders: Mapping[str, LoraFolder],
    formats: Formats,
) -> Model:
    config = source.config
    picked = pick_kernels(config, DTYPES[dtype], device, threads, kernels == "torch", formats)
    weights = load_weights(source, DTYPES[dtype], device, context + WINDOW_SLACK, picked.make_weight, picked.make_head)
    spec = spec_of(source, dtype, context, formats, folders)
    make = picked.make_linear
    adapters = [load_adapter(folder.pairs, config, DTYPES[dtype], device, make) for folder in folders.values()]
    model = assemble(config, spec, weights, picked, adapters, as_program=kernels == "auto")
    if device.type == "cpu":
        warm_up(model)
    return model


def open_adapters(paths: Mapping[str, str], config: LlamaConfig) -> dict[str, LoraFolder]:
    return {name: LoraFolder(Path(path).expanduser(), config) for name, path in paths.items()}


def hashlm_adapters(paths: Mapping[str, str]) -> tuple[AdapterSpec, ...]:
    """Nothing is read: what tells them apart is the path."""
    return tuple(AdapterSpec(name, f"hashlm {path}") for name, path in paths.items())


def spec_of(
    source: TensorSource, dtype: str, context: int, formats: Formats, folders: Mapping[str, LoraFolder]
) -> ModelSpec:
    config, narrow = source.config, "" if formats.weights == "auto" else f" {formats.weights}"
    return ModelSpec(
        name=config.name,
        vocab_size=config.vocab_size,
        max_context=context,
        dtype=dtype,
        weights_hash=source.content_hash() + narrow,  # they are others then
        eos_ids=config.eos_ids,
        adapters=tuple(AdapterSpec(name, folder.digest) for name, folder in folders.items()),
        kv_dtype=formats.kv,
    )


def assemble(
    config: LlamaConfig,
    spec: ModelSpec,
    weights: LlamaWeights,
    picked: Kernels,
    adapters: Sequence[Adapter],
    as_program: bool,
    span: Span | None = None,
) -> LlamaLike:
    """`span`: for a stage, which has kernels of its own; all layers when not given."""
    attention = picked.make_attention(weights.rope, weights.local_rope)
    model = LlamaModel(config, spec, weights, attention, picked.blocks, adapters, span=span)
    if picked.team is not None and as_program:
        from shared.model.llama_compiled import CompiledLlama, obstacle

        reason = obstacle(config, spec, weights)
        if reason is None:
            program = CompiledLlama(config, spec, weights, picked.team, span)
            return AdaptedModel(program, model) if adapters else program
        logging.getLogger(__name__).info("a step runs kernel by kernel, not as one compiled program: %s", reason)
    return model


def warm_up(model: Model) -> None:
    """Two tiny steps, so that no request waits for a kernel to be compiled or read from disk."""
    pool = KVPool(model.kv_planes(WARM_PAGE), 2, WARM_PAGE)
    with torch.inference_mode():
        for count in (1, WARM_PAGE):
            inputs = ModelInputs(
                input_ids=torch.zeros(count, dtype=torch.int64),
                positions=torch.arange(count),
                cu_q_lens=torch.tensor([0, count], dtype=torch.int32),
                page_table=torch.ones(1, 1, dtype=torch.int32),
                logits_idx=torch.arange(count),
                max_q_len=count,
                max_seq_len=count,
            )
            model.forward(inputs, pool)
    pool.close()


def context_of(source: TensorSource, asked: int) -> int:
    limit = source.config.max_context
    if asked > limit:
        raise ConfigError(f"--max-context is {asked}; this model was made for at most {limit}")
    return asked or limit


def load_eagle_head(
    name: str, model: str, target: DraftTarget, *, threads: int = 1, kernels: str = "auto"
) -> EagleHead:
    """`name`: a folder in the public format, or auto: the head shipped for `model`, the name the target was loaded by.
    Device, dtype, embedding and context are the target's; ConfigError names a tensor or field that does not fit it.
    `threads` and `kernels` as for load_model."""
    source = HeadFolder(resolve_head(name, model), target.config)
    layer, embed = source.config.layer, target.embed
    picked = pick_kernels(layer, embed.dtype, embed.device, threads, plain=kernels == "torch")
    context = target.spec.max_context + WINDOW_SLACK
    weights = load_eagle_weights(source, embed, context, picked.make_linear, picked.make_head)
    midlayer = _midlayer(layer, weights, picked, as_program=kernels == "auto")
    head = EagleHead(source, target.spec, weights, midlayer, picked.blocks)
    if embed.device.type == "cpu":
        warm_up_head(head)
    return head


def _midlayer(config: LlamaConfig, weights: EagleWeights, picked: Kernels, as_program: bool) -> Midlayer:
    if picked.team is not None and as_program:
        from shared.model.eagle_compiled import CompiledMidlayer, fits

        if fits(config, weights):
            return CompiledMidlayer(config, weights, picked.team)
    return SeparateMidlayer(weights, picked.make_attention(weights.rope, None), picked.blocks)


def warm_up_head(head: EagleHead) -> None:
    """As warm_up."""
    pool = KVPool(head.kv_planes(WARM_PAGE), 2, WARM_PAGE)
    with torch.inference_mode():
        for count in (1, WARM_PAGE):
            cu_q_lens, table = torch.tensor([0, count], dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
            view = AttentionInputs(torch.arange(count), cu_q_lens, table, count, count)
            features = torch.zeros(count, head.hidden_size)
            head.logits(head.forward(torch.zeros(count, dtype=torch.int64), features, view, pool))
    pool.close()
