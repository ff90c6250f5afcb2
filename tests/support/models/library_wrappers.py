"""Tiny configs of the library's wrappers: kinds that also see images or hear, of which Baton serves the text part.

A config begins as the library's defaults. In each of its parts the fields of SIZES or TOWER that it has become small.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from tests.support.models.library_families import (
    EXPERTS,
    GROUPED,
    LATENT,
    LOCAL,
    SIZES,
    VOCAB,
    WINDOW,
    Family,
    drawn_network,
    loaded_family,
)

# Of the text part. Lists that have one entry for each layer are cut.
TEXT: dict[str, Any] = (
    SIZES
    | EXPERTS
    | LOCAL
    | GROUPED
    | LATENT
    | WINDOW
    | {"num_key_value_heads": 2, "num_hidden_layers": 2, "moe_num_experts": 4, "moe_topk": 2, "moe_k": 2}
    | {"ffn_dim": 96, "word_embed_proj_dim": 64, "vocab_size_per_layer_input": VOCAB}
)
# Of all other parts.
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "head_dim": 16,
    "embed_dim": 32,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vocab_size": 99,
    # These are the text part's.
    "out_hidden_size": 64,
    "text_hidden_size": 64,
}
MADE_AS = "model_type"
BY_LAYER = ("layer_types", "mlp_layer_types")
Parts = dict[str, dict[str, Any]]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BY_KIND = {"sliding_attention": ROPE, "full_attention": ROPE}
CHOOSES = {"index_head_dim": 32, "index_n_heads": 16, "index_topk": 24, "indexer_types": ["full", "full"]}
HEARS: Parts = {"": {"vision_start_token_id": 205}}  # which `generate` asks for


def axes(*sections: int) -> Parts:
    """Rotary positions of several axes."""
    return text(rope_parameters=ROPE | {"mrope_section": list(sections)})


def text(**fields: Any) -> Parts:
    return {"text_config": fields}


# Beside the small sizes; the whole's own fields are under "".
WRAPPERS: dict[str, Parts] = {
    "apertus1p5": {
        "": {"image_token_offset": 30, "audio_token_offset": 50, "image_token_id": 9, "audio_token_id": 10},
        "vision_config": {"codebook_size": 20},
        "audio_config": {"codebook_dim": 32, "hidden_size": 32, "codebook_size": 20},
    },
    "aria": {},
    "aya_vision": {},
    "blip-2": {},
    "chameleon": {"": {"vocabulary_map": {"<image>": 9, "IMGIMGAZ": 10, "IMGIMGBZ": 11}}},
    "cohere2_vision": {},
    "cohere_compass": text(layer_types=["sliding_attention", "full_attention"], rope_parameters=BY_KIND),
    "cosmos3_edge": axes(4, 2, 2),
    "cosmos3_omni": {},
    "deepseek_ocr2": text(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2),
    "deepseek_vl": {},
    "deepseek_vl_hybrid": {},
    "ernie4_5_vl_moe": text(moe_intermediate_size=[32, 16], rope_parameters=ROPE | {"mrope_section": [3, 3, 2]}),
    "emu3": {"": {"vocabulary_map": {"<image>": 9}}, "vq_config": {"base_channels": 32, "channel_multiplier": [1]}},
    "exaone4_5": {},
    "fast_vlm": {},
    "fuyu": {},
    "gemma3": {},
    "gemma3n": text(activation_sparsity_pattern=[0.5, 0.0], num_kv_shared_layers=0),
    "gemma4": {
        "text_config": {"per_layer_config": {"1": {"head_dim": 32}}, "vocab_size_per_layer_input": 211},
        "vision_config": {MADE_AS: "gemma4_vision", "position_embedding_size": 64},
    },
    "gemma4_unified": text(per_layer_config={"1": {"head_dim": 32}}),
    "glm46v": axes(2, 3, 3),
    "glm4v": axes(2, 3, 3),
    "glm4v_moe": axes(1, 1, 2),
    "glm_ocr": axes(2, 3, 3),
    "glmga": axes(2, 3, 3),
    "got_ocr2": {},
    "granite4_vision": {
        "": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]},
        "vision_config": {"hidden_size": 64},
        "qformer_config": {"encoder_hidden_size": 64, "hidden_size": 64},
    },
    "granite_docling": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "hy_v4_vl": text(**CHOOSES, rope_parameters=ROPE | {"mrope_section": [2, 3, 3]}),
    "hunyuan_vl": text(head_dim=16, rope_parameters=ROPE | {"mrope_section": [2, 2, 2, 2]}),
    "hyperclovax_vision_v2": {},
    "idefics2": {},
    "idefics3": {},
    "instructblip": {},
    "instructblipvideo": {},
    "internvl": {},
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_embeddings": 16}},
    "kimi_k25": text(num_key_value_heads=4),
    "lfm2_vl": {},
    "lighton_ocr": {},
    "llama4": text(attention_chunk_size=16, floor_scale=8, intermediate_size_mlp=96),
    "llava": {},
    "llava_next": {},
    "llava_next_video": {},
    "llava_onevision": {},
    "minimax_m3_vl": {},
    "mistral3": {},
    "mistral_large4": text(
        **CHOOSES, num_key_value_heads=4, kv_source_layers=[0, 1], no_rope_layers=[1, 1], rope_parameters=ROPE
    ),
    "mistral4": {"": {"num_key_value_heads": 4, "head_dim": 32}},
    "molmo2": {
        "vision_config": {"image_size": [28, 28]},
        "adapter_config": {"vision_feature_layer": [0]},
    },
    "muse_glimmer": {},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 8, 8]}},
    "ovis2": {},
    "paddleocr_vl": axes(2, 3, 3),
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 16}}},
    "pp_chart2table": {},
    "qianfan_ocr": {},
    "qwen2_5_omni_thinker": axes(2, 3, 3) | HEARS,
    "qwen2_5_vl": axes(2, 3, 3),
    "qwen2_vl": axes(2, 3, 3),
    "qwen3_omni_moe_thinker": axes(4, 2, 2) | HEARS,
    "qwen3_vl": axes(4, 2, 2),
    "qwen3_vl_moe": axes(4, 2, 2),
    "smolvlm": {},
    "video_llama_3": {},
    "video_llava": {},
    "vipllava": {},
}


# Their own `generate` asks for images, or fails without (Llama 4's). A network in them answers.
ANSWERED_INSIDE = ("blip-2", "instructblip", "instructblipvideo", "llama4")


def small(given: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a part, made small. A size that it leaves out stays out."""
    found = {name: sizes[name] if value is not None and name in sizes else value for name, value in given.items()}
    found |= {
        name: small(value, sizes) for name, value in given.items() if isinstance(value, dict) and MADE_AS in value
    }
    for name in BY_LAYER:
        if found.get(name):
            found[name] = shorter(found[name], sizes["num_hidden_layers"])
    return found


def shorter(kinds: list[str], count: int) -> list[str]:
    """Return `count` kinds of layers, all kinds as far as they go."""
    every = [*dict.fromkeys(kinds)]
    return [*itertools.islice(itertools.cycle(every), count)]


def wrapper_config(name: str, **changes: Any) -> transformers.PreTrainedConfig:
    """`changes`: of the text part."""
    kind, own = transformers.CONFIG_MAPPING[name], WRAPPERS[name]
    whole = kind()
    text, fields = whole.get_text_config(), {}
    if text is whole:
        fields = small({name: value for name, value in whole.to_dict().items() if name not in kind.sub_configs}, TEXT)
    for part in kind.sub_configs:
        described, special = getattr(whole, part, None), own.get(part, {})
        if described is None and MADE_AS in special:
            described = transformers.CONFIG_MAPPING[special[MADE_AS]]()
        if described is not None:
            sizes, more = (TEXT, changes) if described is text else (TOWER, {})
            fields[part] = small(described.to_dict(), sizes) | special | more
    config: transformers.PreTrainedConfig = kind(**fields | own.get("", {}))
    return config


def save_wrapper(name: str, folder: Path, **changes: Any) -> transformers.PreTrainedModel:
    network = drawn_network(wrapper_config(name, **changes))
    network.save_pretrained(folder)
    return network


def make_wrapper(name: str, folder: Path) -> Family:
    network = save_wrapper(name, folder)
    return loaded_family(name, folder, network.language_model if name in ANSWERED_INSIDE else network)
