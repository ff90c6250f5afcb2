"""The default model as transformers runs it: the reference that nobody here wrote."""

from __future__ import annotations

import transformers

from shared.config.model_path import bundled_gguf
from shared.model.opened import open_model
from shared.model.safetensors_folder import hf_name

PARTS = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")


def default_model_in_transformers() -> transformers.PreTrainedModel:
    """The default model's dequantised weights in float32."""
    source = open_model(bundled_gguf())
    config = source.config
    state = {
        hf_name(name): source.tensor(name)
        for name in ["embed", "norm", *(f"layers.{n}.{part}" for n in range(config.num_layers) for part in PARTS)]
    }
    state[hf_name("head")] = state[hf_name("embed")]
    network = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_context,
            rms_norm_eps=config.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=True,
        )
    )
    network.load_state_dict(state)
    return network.eval()
