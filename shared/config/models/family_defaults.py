"""Values that a config.json may leave out, because transformers has them as defaults of the family.

Folders of models that also see images often leave them out: Gemma 3 4B says neither. A test compares the table with the
library.
"""

from __future__ import annotations

from collections.abc import Mapping

# fmt: off
# (vocab_size, max_position_embeddings), by the model_type of a text part, or of a whole whose part does not say its own
FAMILY_DEFAULTS: Mapping[str, tuple[int, int]] = {
    "afmoe": (200192, 16384), "apertus": (131072, 65536), "apertus1p5": (266752, 65536),
    "apertus1p5_text": (266752, 65536), "arcee": (32000, 4096), "aria": (32000, 2048), "aria_text": (32000, 2048),
    "axk1": (163840, 32768), "axk2": (163840, 131072), "aya_vision": (256000, 8192), "beam": (151936, 8192),
    "biogpt": (42384, 1024), "bitnet": (128256, 2048), "blip-2": (50272, 2048), "chameleon": (65536, 4096),
    "cohere": (256000, 8192), "cohere2": (256000, 8192), "cohere2_moe": (256000, 8192),
    "cohere2_vision": (256000, 8192), "cohere_compass": (256000, 8192), "cohere_compass_text": (256000, 8192),
    "cosmos3_edge": (131072, 131072), "cosmos3_edge_text": (131072, 131072), "cosmos3_omni": (151936, 128000),
    "ctrl": (246534, 256), "cwm": (128256, 131072), "deepseek_ocr2": (102400, 2048),
    "deepseek_ocr2_text": (102400, 2048), "deepseek_v2": (102400, 2048), "deepseek_v3": (129280, 4096),
    "deepseek_v32": (129280, 163840), "deepseek_vl": (32000, 2048), "deepseek_vl_hybrid": (32000, 2048),
    "diffllama": (32000, 2048), "dots1": (152064, 2048), "emu3": (184622, 9216), "emu3_text_model": (184622, 9216),
    "ernie4_5": (103424, 131072), "ernie4_5_moe": (103424, 131072), "ernie4_5_vl_moe": (103424, 131072),
    "ernie4_5_vl_moe_text": (103424, 131072), "exaone": (102400, 4096), "exaone4": (102400, 2048),
    "exaone4_5": (102400, 2048), "exaone_moe": (102400, 2048), "fast_vlm": (152128, 32768), "flex_olmo": (100352, 4096),
    "fuyu": (262144, 16384), "gemma": (256000, 8192), "gemma2": (256000, 8192), "gemma3": (262208, 131072),
    "gemma3_text": (262208, 131072), "gemma3n": (262400, 32768), "gemma3n_text": (262400, 32768),
    "gemma4": (262144, 131072), "gemma4_text": (262144, 131072), "gemma4_unified": (262144, 262144),
    "gemma4_unified_text": (262144, 262144), "glm": (151552, 131072), "glm4": (151552, 131072),
    "glm46v": (151552, 32768), "glm4_moe": (151552, 131072), "glm4_moe_lite": (154880, 202752),
    "glm4v": (151552, 32768), "glm4v_moe": (151424, 65536), "glm4v_moe_text": (151424, 65536),
    "glm4v_text": (151552, 32768), "glm_moe_dsa": (154880, 202752), "glm_ocr": (59392, 131072),
    "glm_ocr_text": (59392, 131072), "glmga": (151552, 32768), "got_ocr2": (151860, 32768), "gpt2": (50257, 1024),
    "gpt_bigcode": (50257, 1024), "gpt_neox": (50432, 2048), "gpt_oss": (201088, 131072), "granite": (32000, 2048),
    "granite4_vision": (32000, 2048), "granite4_vision_text": (32000, 2048), "granite_docling": (133800, 32768),
    "granite_docling_text": (133800, 32768), "granite_swa": (100352, 8192), "granitemoe": (32000, 2048),
    "granitemoe_swa": (32000, 2048), "granitemoeshared": (32000, 2048), "helium": (48000, 4096),
    "hunyuan_v1_dense": (290943, 2048), "hunyuan_v1_moe": (290943, 2048), "hunyuan_vl": (290943, 2048),
    "hunyuan_vl_text": (290943, 2048), "hy_v3": (120832, 131072), "hy_v4": (120832, 262144),
    "hy_v4_vl": (120832, 262144), "hy_v4_vl_text": (120832, 262144), "hyperclovax": (32000, 2048),
    "hyperclovax_vision_v2": (32000, 2048), "idefics2": (32000, 32768), "idefics3": (32000, 2048),
    "instructblip": (50272, 2048), "instructblipvideo": (50272, 2048), "internlm3": (128512, 32768),
    "internvl": (151936, 32768), "iquestcoder": (76800, 131072), "jais2": (150272, 8192), "janus": (32000, 2048),
    "jetmoe": (32000, 4096), "kimi_k25": (129280, 4096), "kolibri1": (128000, 262144), "laguna": (100352, 131072),
    "lfm2": (65536, 128000), "lfm2_vl": (65536, 128000), "lighton_ocr": (151936, 40960), "llama": (32000, 2048),
    "llama4": (202048, 131072), "llama4_text": (202048, 131072), "llava": (32000, 2048), "llava_next": (32000, 2048),
    "llava_next_video": (32000, 2048), "llava_onevision": (151936, 32768), "longcat_flash": (131072, 131072),
    "mellum": (98304, 131072), "mimo_v2_flash": (152576, 131072), "minicpm3": (73448, 32768),
    "minimax_m2": (200064, 196608), "minimax_m3_vl": (200064, 524288), "minimax_m3_vl_text": (200064, 524288),
    "ministral": (32000, 131072), "ministral3": (131072, 262144), "mistral": (32000, 131072),
    "mistral3": (131072, 131072), "mistral4": (131072, 1048576), "mistral_large4": (204800, 1048576),
    "mistral_large4_text": (204800, 1048576), "mixtral": (32000, 131072), "modernbert-decoder": (50368, 8192),
    "molmo2": (151936, 36864), "molmo2_text": (151936, 36864), "muse_glimmer": (202048, 131072),
    "muse_glimmer_text": (202048, 131072), "muse_spark": (202048, 1048576), "muse_spark_text": (202048, 1048576),
    "nanochat": (50304, 2048), "nemotron": (256000, 4096), "olmo": (50304, 2048), "olmo2": (50304, 2048),
    "olmo3": (50304, 2048), "olmoe": (50304, 4096), "opt": (50272, 2048), "ovis2": (151936, 32768),
    "paddleocr_vl": (103424, 131072), "paddleocr_vl_text": (103424, 131072), "perception_lm": (32000, 2048),
    "persimmon": (262144, 16384), "phi": (51200, 2048), "phi3": (32064, 4096), "phimoe": (32064, 131072),
    "pp_chart2table": (151860, 32768), "qianfan_ocr": (151936, 32768), "qwen2": (151936, 32768),
    "qwen2_5_omni_text": (152064, 32768), "qwen2_5_omni_thinker": (152064, 32768), "qwen2_5_vl": (152064, 32768),
    "qwen2_5_vl_text": (152064, 32768), "qwen2_moe": (151936, 32768), "qwen2_vl": (152064, 32768),
    "qwen2_vl_text": (152064, 32768), "qwen3": (151936, 32768), "qwen3_moe": (151936, 32768),
    "qwen3_omni_moe_text": (3584, 32768), "qwen3_omni_moe_thinker": (3584, 32768), "qwen3_vl": (151936, 128000),
    "qwen3_vl_moe": (151936, 128000), "qwen3_vl_moe_text": (151936, 128000), "qwen3_vl_text": (151936, 128000),
    "sarvam_mla": (262144, 4096), "sarvam_moe": (262144, 131072), "seed_oss": (155136, 524288),
    "smollm3": (128256, 32768), "smolvlm": (32000, 2048), "solar_open": (196608, 131072), "stablelm": (50304, 4096),
    "starcoder2": (49152, 4096), "step3p5": (128815, 128000), "step3p7": (128815, 128000), "vaultgemma": (256000, 8192),
    "video_llama_3": (151936, 32768), "video_llava": (32000, 2048), "vipllava": (32000, 2048),
    "youtu": (128256, 131072),
}
# fmt: on
