"""Values that a config.json may leave out, because transformers has them as defaults of the family.

Folders of models that also see images often leave them out: Gemma 3 4B says neither. A test compares the table with the
library.
"""

from __future__ import annotations

from collections.abc import Mapping

# fmt: off
# (vocab_size, max_position_embeddings), by the model_type of a text part, or of a whole whose part does not say its own
FAMILY_DEFAULTS: Mapping[str, tuple[int, int]] = {
    "apertus": (131072, 65536), "arcee": (32000, 4096), "bitnet": (128256, 2048), "cohere": (256000, 8192),
    "cohere2": (256000, 8192), "deepseek_v2": (102400, 2048), "deepseek_v3": (129280, 4096),
    "ernie4_5": (103424, 131072), "ernie4_5_moe": (103424, 131072), "exaone4": (102400, 2048),
    "exaone_moe": (102400, 2048), "flex_olmo": (100352, 4096), "gemma": (256000, 8192), "gemma2": (256000, 8192),
    "gemma3": (262208, 131072), "gemma3_text": (262208, 131072), "gemma4": (262144, 131072),
    "gemma4_text": (262144, 131072), "glm": (151552, 131072), "glm4": (151552, 131072), "glm4_moe": (151552, 131072),
    "glm4_moe_lite": (154880, 202752), "gpt2": (50257, 1024), "gpt_bigcode": (50257, 1024), "gpt_neox": (50432, 2048),
    "gpt_oss": (201088, 131072), "granite": (32000, 2048), "granitemoe": (32000, 2048), "helium": (48000, 4096),
    "hunyuan_v1_dense": (290943, 2048), "hunyuan_v1_moe": (290943, 2048), "jais2": (150272, 8192),
    "llama": (32000, 2048), "longcat_flash": (131072, 131072), "mellum": (98304, 131072),
    "mimo_v2_flash": (152576, 131072), "minimax_m2": (200064, 196608), "ministral": (32000, 131072),
    "ministral3": (131072, 262144), "mistral": (32000, 131072), "mixtral": (32000, 131072), "nemotron": (256000, 4096),
    "olmo": (50304, 2048), "olmo2": (50304, 2048), "olmo3": (50304, 2048), "olmoe": (50304, 4096),
    "opt": (50272, 2048), "persimmon": (262144, 16384), "phi": (51200, 2048), "phi3": (32064, 4096),
    "phimoe": (32064, 131072), "qwen2": (151936, 32768), "qwen2_moe": (151936, 32768), "qwen3": (151936, 32768),
    "qwen3_moe": (151936, 32768), "seed_oss": (155136, 524288), "smollm3": (128256, 32768), "stablelm": (50304, 4096),
    "starcoder2": (49152, 4096), "step3p5": (128815, 128000), "step3p7": (128815, 128000),
}
# fmt: on
