"""Sizes of models that people run. Importing this needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RealModel:
    """The sizes of a model that people run. Draft heads and a rank's shards are not larger."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


REAL_MODELS = (
    RealModel("SmolLM2-135M", 576, 1536, 9, 3, 64, 49152),
    RealModel("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 128256),
    RealModel("Llama-3.1-70B", 8192, 28672, 64, 8, 128, 128256),
    RealModel("Qwen2.5-7B", 3584, 18944, 28, 4, 128, 152064),
    RealModel("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936),
    RealModel("Gemma-2-9B", 3584, 14336, 16, 8, 256, 256000),
    RealModel("Phi-3-mini", 3072, 8192, 32, 32, 96, 32064),
    RealModel("StableLM-3B", 2560, 6912, 32, 32, 80, 50304),
)
