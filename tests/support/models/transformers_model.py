"""Our models as transformers runs them: the reference that nobody here wrote."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from shared.config.models.model_path import bundled_gguf
from shared.model.formats.opened import open_model
from shared.model.formats.safetensors_folder import hf_name
from shared.model.math.config import LlamaConfig, RopeConfig
from shared.model.math.weights import TensorSource

LAYER_PARTS = ("attn_norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o", "o_bias", "mlp_norm")
MLP_PARTS = ("gate", "up", "down")
CONFIGS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def default_model_in_transformers() -> transformers.PreTrainedModel:
    """The default model's dequantised weights in float32."""
    return reference_network(open_model(bundled_gguf()), torch.float32)


def reference_network(source: TensorSource, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """transformers' network with the same (dequantised) weights."""
    config = source.config
    names = [f"layers.{n}.{part}" for n in range(config.num_layers) for part in LAYER_PARTS + MLP_PARTS]
    names += ["embed", "norm", "head"]
    state = {hf_name(name): source.tensor(name) for name in names if source.has(name)}
    if config.tie_embeddings:
        state[hf_name("head")] = state[hf_name("embed")]
    network = CONFIGS[config.family][1](reference_config(config))
    network.load_state_dict(state)
    return network.to(dtype).eval()


def reference_config(config: LlamaConfig, attention: str = "sdpa") -> transformers.PretrainedConfig:
    return CONFIGS[config.family][0](
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context,
        rms_norm_eps=config.rms_eps,
        rope_parameters=rope_parameters(config.rope),
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation=attention,
    )


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    plain = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain | {"factor": rope.factor}
    return plain | {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }
