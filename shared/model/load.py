"""From a path or a short name to a Model. The one place that opens weight files and picks kernels."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import psutil
import torch

from shared.config.model_path import resolve_model
from shared.core.errors import ConfigError
from shared.kernel.attention import AttentionBackend, AttentionShape, TorchAttention
from shared.kernel.blocks import BlockKernels, TorchBlocks
from shared.kernel.linear import FloatHead, pick_linear
from shared.kernel.team import Team
from shared.kv.pool import KVPool
from shared.model.config import LlamaConfig
from shared.model.gguf_file import GgufFile
from shared.model.interface import Model, ModelInputs, ModelSpec
from shared.model.llama import LlamaModel
from shared.model.safetensors_folder import SafetensorsFolder
from shared.model.weights import Head, HeadFactory, TensorSource, load_weights, weights_bytes

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
) -> Model:
    """`name`: smollm2, hashlm, a .gguf file or a Hugging Face folder. `max_context` 0 means what the model can.

    `threads` is what the core plan gives this process. `kernels`: "auto" or "torch" (plain torch only).
    `available_bytes` bounds the weights; None asks the operating system.
    """
    found = resolve_model(name)
    if found.path is None:
        from shared.model.hashlm import HashLM  # not before it is asked for

        return HashLM(max_context=max_context) if max_context else HashLM()
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    source = open_model(found.path)
    context = _context(source, max_context)
    if device == "cpu":
        need = weights_bytes(source.config, DTYPES[dtype], context)
        check_memory(need, psutil.virtual_memory().available if available_bytes is None else available_bytes)
    return build_model(source, dtype, torch.device(device), context, threads, kernels)


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
    source: TensorSource, dtype: str, device: torch.device, context: int, threads: int, kernels: str
) -> LlamaModel:
    config = source.config
    compiled = device.type == "cpu" and kernels != "torch" and has_numba()
    torch_dtype, team = DTYPES[dtype], Team(threads if compiled else 1)
    make_head = _pick_head(torch_dtype, device, team, compiled)
    weights = load_weights(source, torch_dtype, device, context + WINDOW_SLACK, make_head)
    spec = ModelSpec(
        name=config.name,
        vocab_size=config.vocab_size,
        max_context=context,
        dtype=dtype,
        weights_hash=source.content_hash(),
        eos_ids=config.eos_ids,
    )
    attention, blocks = _pick_kernels(config, torch_dtype, weights.rope, team, compiled)
    model = LlamaModel(config, spec, weights, attention, blocks)
    if device.type == "cpu":
        warm_up(model)
    return model


def _pick_head(dtype: torch.dtype, device: torch.device, team: Team, compiled: bool) -> HeadFactory:
    """Logits are float32 in every mode: bfloat16 ones tie."""
    make = pick_linear(device, torch.float32)

    def make_float(weight: torch.Tensor) -> FloatHead:
        return FloatHead(make(weight.float(), None))

    def make_half(weight: torch.Tensor) -> Head:
        from shared.kernel.head_half import HalfHead, supports

        return HalfHead(weight, team) if supports(weight.shape[1]) else make_float(weight)

    return make_half if compiled and dtype == torch.bfloat16 else make_float


def has_numba() -> bool:
    """One log line where it is missing or broken; everything works without it, slower."""
    try:
        importlib.import_module("numba")
    except ImportError as error:
        logging.getLogger(__name__).warning("numba can't be used (%s): plain torch kernels, slower", error)
        return False
    return True


def _pick_kernels(
    config: LlamaConfig,
    dtype: torch.dtype,
    rope: tuple[torch.Tensor, torch.Tensor],
    team: Team,
    compiled: bool,
) -> tuple[AttentionBackend, BlockKernels]:
    """numba's on a CPU; torch's elsewhere, and for heads of a size that numba's don't take."""
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_eps)
    if compiled:
        from shared.kernel.attention_numba import NumbaAttention, supports
        from shared.kernel.blocks_numba import NumbaBlocks

        if supports(shape):
            blocks = NumbaBlocks(config.hidden_size, config.intermediate_size, config.rms_eps, dtype, team)
            return NumbaAttention(shape, dtype, rope, team), blocks
    return TorchAttention(shape, rope), TorchBlocks(config.rms_eps, dtype)


def warm_up(model: LlamaModel) -> None:
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


def _context(source: TensorSource, asked: int) -> int:
    limit = source.config.max_context
    if asked > limit:
        raise ConfigError(f"--max-context is {asked}; this model was made for at most {limit}")
    return asked or limit
