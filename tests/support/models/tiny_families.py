"""A tiny random network of every family, as transformers makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from tests.support.models.tiny_models import VOCAB, save_random

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WHOLE = SIZES | {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
MOE = SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA = SIZES | {"pad_token_id": 0, "num_key_value_heads": 1, "sliding_window": 7, "query_pre_attn_scalar": 24}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
Make = Callable[[], transformers.PreTrainedModel]


def llama(**changes: Any) -> Make:
    return lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def qwen2(**changes: Any) -> Make:
    sizes = {name: value for name, value in (SIZES | changes).items() if name != "head_dim"}
    return lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))


def qwen3(**changes: Any) -> Make:
    return lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SIZES | changes)))


def moe(**changes: Any) -> Make:
    return lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(MOE | changes)))


def mistral(**changes: Any) -> Make:
    return lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**(SIZES | changes)))


def gemma(**changes: Any) -> Make:
    return lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**(GEMMA | changes)))


FAMILIES: dict[str, Make] = {
    "llama, llama3 rope": llama(rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32}),
    "llama, linear rope": llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama, dynamic rope": llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "llama, yarn": llama(rope_parameters=YARN),
    "llama, yarn with all fields": llama(
        rope_parameters=YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3}
    ),
    "qwen2": qwen2(),
    "qwen2, yarn, tied": qwen2(rope_parameters=YARN, tie_word_embeddings=True),
    "qwen2, upper layers windowed": qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=2),
    "qwen3": qwen3(),
    "qwen3, odd size": qwen3(intermediate_size=80),
    "qwen3, large heads": qwen3(head_dim=32),
    "qwen3, biases": qwen3(attention_bias=True),
    "qwen3-moe": moe(),
    "qwen3-moe, normalised": moe(norm_topk_prob=True),
    "qwen3-moe, every second layer": moe(decoder_sparse_step=2, mlp_only_layers=[3]),
    "qwen3-moe, windowed": moe(use_sliding_window=True, sliding_window=5),
    "mistral": mistral(sliding_window=None),
    "mistral, windowed": mistral(sliding_window=10),
    "mistral, windowed, whole": mistral(**(WHOLE | {"sliding_window": 10})),
    "mistral, window of one": mistral(sliding_window=1),
    "gemma3": gemma(layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma3, all layers windowed": gemma(),
    "gemma3, stretched, capped": gemma(
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_parameters=GEMMA_ROPE,
        final_logit_softcapping=3.0,
    ),
    "gemma3, whole": gemma(
        num_key_value_heads=2, layer_types=["sliding_attention", "full_attention"] * 2, final_logit_softcapping=3.0
    ),
    "gemma3, untied": gemma(tie_word_embeddings=False, layer_types=["full_attention", "sliding_attention"] * 2),
}


def save(family: str, folder: Path) -> transformers.PreTrainedModel:
    return save_random(FAMILIES[family](), folder)
