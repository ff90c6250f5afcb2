"""Networks of real sizes with random weights, drawn on the device: no file, no download."""

from __future__ import annotations

import torch
import transformers

from shared.model.loading.made_up import made_up
from shared.model.math.config import LlamaConfig, RopeConfig
from shared.model.math.interface import Model
from tests.support.models.transformers_model import reference_config

CONTEXT = 8192


def shape(
    name: str, family: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocab: int, tied: bool
) -> LlamaConfig:
    num_heads, num_kv_heads, head_dim = heads
    return LlamaConfig(
        name, family, vocab, hidden, inner, layers, num_heads, num_kv_heads, head_dim,
        1e-5, RopeConfig(500_000.0), CONTEXT, tied, eos_ids=(),
    )  # fmt: skip


SHAPES = {
    "0.6B": shape("0.6B", "qwen3", 1024, 3072, 28, (16, 8, 128), 151_936, tied=True),  # Qwen3-0.6B's
    "8B": shape("8B", "llama", 4096, 14_336, 32, (32, 8, 128), 128_256, tied=False),  # Llama-3.1-8B's
    "tiny": shape("tiny", "qwen3", 32, 48, 2, (4, 2, 8), 40_064, tied=True),
}


def random_model(config: LlamaConfig, device: torch.device, kernels: str) -> Model:
    """In bfloat16, on `kernels`, as of LoadOptions."""
    return made_up(config, "bfloat16", device, kernels=kernels)


def random_network(config: LlamaConfig, device: torch.device, attention: str) -> transformers.PreTrainedModel:
    """transformers' network of the same shape, in bfloat16 on the device, with weights of its own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return transformers.AutoModelForCausalLM.from_config(reference_config(config, attention)).eval()
    finally:
        torch.set_default_dtype(before)
