"""Read a Hugging Face config.json as a LlamaConfig.

An unread field could change answers, so each field is used, known to be harmless, or refused by name. Empty and false
fields are accepted, as are fields without a meaning in the library's network (config_fields.py). Missing fields get the
architecture's defaults (huggingface.co/docs/transformers).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config.models.folder_facts import FolderFacts, facts_of
from shared.config.models.model_folder import CONFIG, ModelFolder
from shared.core.errors import ConfigError
from shared.model.formats.config_fields import NotOurs, fields_that_matter
from shared.model.formats.hf_rope import rope_from_hf, ropes_by_layer
from shared.model.formats.quantized_scheme import scheme_of
from shared.model.math.config import MOST_PARTS, ExpertConfig, LayerStyle, LlamaConfig

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma3ForCausalLM": "gemma3",
}
_USED = (
    "architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim rms_norm_eps max_position_embeddings tie_word_embeddings eos_token_id rope_theta rope_scaling "
    "rope_parameters partial_rotary_factor quantization_config"
)
USED = frozenset(_USED.split())
# No answer depends on these settings.
_NO_MATTER = (
    "_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _from_model_config _name_or_path "
    "attention_dropout attn_implementation auto_map bos_token_id cache_implementation cls_token_id do_sample dtype "
    "hidden_dropout id2label initializer_range is_llama_config label2id max_length max_new_tokens model_type "
    "output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type return_dict "
    "router_aux_loss_coef sep_token_id task_specific_params temperature tokenizer_class top_k top_p torch_dtype "
    "transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache"
)
NO_MATTER = frozenset(_NO_MATTER.split())
FAMILY_FIELDS = {
    "llama": "hidden_act mlp_bias attention_bias",
    "mistral": "hidden_act sliding_window",
    "qwen2": "hidden_act sliding_window use_sliding_window max_window_layers layer_types",
    "qwen3": "hidden_act attention_bias sliding_window use_sliding_window max_window_layers layer_types",
    "qwen3_moe": "hidden_act attention_bias sliding_window use_sliding_window max_window_layers num_experts "
    "num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers",
    "gemma3": "hidden_activation hidden_act attention_bias query_pre_attn_scalar sliding_window layer_types "
    "sliding_window_pattern _sliding_window_pattern rope_local_base_freq final_logit_softcapping",
}
HEAD_DIMS = {"qwen3": 128, "gemma3": 256}  # default head size; other families: hidden size / number of heads
WINDOWED, WHOLE = "sliding_attention", "full_attention"


def config_from_hf(folder: ModelFolder) -> LlamaConfig:
    """Raise ConfigError for a folder that our program can't run, NotOurs if the library may run it."""
    try:
        family = _family(folder.path, folder.config)
        _check_fields(folder.path, folder.config, family)
        return _from_hf(folder, family)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"{folder.path / CONFIG}: missing or wrong field {error}") from error


def _family(folder: Path, raw: Mapping[str, Any]) -> str:
    arch = (raw.get("architectures") or ["?"])[0]
    if arch not in HF_ARCHITECTURES:
        raise NotOurs(folder, f"architecture {arch!r} is not supported, only {', '.join(HF_ARCHITECTURES)}")
    return HF_ARCHITECTURES[arch]


def _check_fields(folder: Path, raw: Mapping[str, Any], family: str) -> None:
    scheme_of(raw, folder)  # refuses a scheme that is not read
    wanted, field = ("gelu_pytorch_tanh", "hidden_activation") if family == "gemma3" else ("silu", "hidden_act")
    for name in {"hidden_act", field}:
        if raw.get(name, wanted) != wanted:
            raise NotOurs(folder, f"{name} {raw[name]!r} is not supported, only SwiGLU, or GeGLU in Gemma 3")
    if raw.get("mlp_bias"):
        raise NotOurs(folder, "mlp_bias is not supported")
    known = USED | NO_MATTER | set(FAMILY_FIELDS[family].split())
    unknown = {name: value for name, value in raw.items() if name not in known and not _is_empty(value)}
    if strange := fields_that_matter(family, unknown):
        listed = ", ".join(f"{name} {raw[name]!r}"[:80] for name in strange)
        raise NotOurs(folder, f"not supported for {family}: {listed}")


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {}


def _from_hf(folder: ModelFolder, family: str) -> LlamaConfig:
    path, raw, facts = folder.path, folder.config, facts_of(folder)
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    num_layers = int(raw["num_hidden_layers"])
    if num_layers > MOST_PARTS:
        raise ValueError(f"num_hidden_layers: {num_layers}")
    head_dim = int(raw.get("head_dim", HEAD_DIMS.get(family)) or hidden // heads)
    rope, local_rope = ropes_by_layer(path, raw) if family == "gemma3" else (rope_from_hf(path, raw), None)
    return LlamaConfig(
        name=folder_name(path),
        family=family,
        vocab_size=vocab_size_of(path, facts),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(raw, family, heads),
        head_dim=head_dim,
        rms_eps=float(raw["rms_norm_eps"]),
        rope=rope,
        max_context=facts.context_length,
        tie_embeddings=bool(raw.get("tie_word_embeddings", family == "gemma3")),
        eos_ids=facts.eos_ids,
        windows=_windows(raw, family, num_layers),
        local_rope=local_rope,
        score_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5 if family == "gemma3" else 0.0,
        experts=_experts(raw, num_layers) if family == "qwen3_moe" else None,
        style=_gemma_style(raw, hidden) if family == "gemma3" else LayerStyle(),
        biases=_biases(raw, family),
    )


def folder_name(folder: Path) -> str:
    """Return org/name for a folder in the hub's cache, else the folder's name.

    The cache names folders after commits, and nodes with equal weights must pair even if their commits differ.
    """
    path = folder.resolve()
    repository = path.parents[1].name if path.parent.name == "snapshots" else ""
    return repository.removeprefix("models--").replace("--", "/") or path.name


def vocab_size_of(folder: Path, facts: FolderFacts) -> int:
    """Raise ConfigError if no file says it, because the router would not know it either."""
    if facts.vocab_size is None:
        raise ConfigError(f"{folder / CONFIG} does not say vocab_size")
    return facts.vocab_size


def _biases(raw: Mapping[str, Any], family: str) -> tuple[str, ...]:
    if family == "qwen2":
        return ("q", "k", "v")
    return ("q", "k", "v", "o") if raw.get("attention_bias") else ()


def _kv_heads(raw: Mapping[str, Any], family: str, heads: int) -> int:
    return int(raw.get("num_key_value_heads") or heads) if family == "llama" else int(raw["num_key_value_heads"])


def _windows(raw: Mapping[str, Any], family: str, num_layers: int) -> tuple[int, ...]:
    window = _window(raw, family)
    types = raw.get("layer_types") or [WINDOWED if _by_default(raw, family, n) else WHOLE for n in range(num_layers)]
    if len(types) != num_layers or not {*types} <= {WINDOWED, WHOLE}:
        raise ValueError(f"layer_types: {sorted({*types})} of {len(types)} layers")
    if window is None and WINDOWED in (types if family == "gemma3" else raw.get("layer_types") or ()):
        raise ValueError("layer_types: sliding_attention, but sliding_window or use_sliding_window says there is none")
    windows = tuple((window or 0) * (kind == WINDOWED) for kind in types)
    return windows if any(windows) else ()


def _window(raw: Mapping[str, Any], family: str) -> int | None:
    if family == "llama" or (family.startswith("qwen") and not raw.get("use_sliding_window")):
        return None
    window = raw.get("sliding_window", 4096)
    if window is not None and int(window) < 1:
        raise ValueError(f"sliding_window: {window}")
    return None if window is None else int(window)


def _by_default(raw: Mapping[str, Any], family: str, layer: int) -> bool:
    """For a file without layer_types, return whether a layer has a window."""
    if family == "gemma3":
        pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
        return (layer + 1) % int(pattern) != 0
    return family not in ("qwen2", "qwen3") or layer >= int(raw.get("max_window_layers", 28))


def _experts(raw: Mapping[str, Any], num_layers: int) -> ExpertConfig:
    count = raw.get("num_experts") or raw.get("num_local_experts")
    if count is None:
        raise KeyError("num_experts")
    step, only_dense = int(raw.get("decoder_sparse_step", 1)), raw.get("mlp_only_layers") or ()
    top_k = int(raw["num_experts_per_tok"])
    if not 0 < top_k <= int(count):
        raise ValueError(f"num_experts_per_tok is {top_k}, and the number of experts {count}")
    return ExpertConfig(
        count=int(count),
        top_k=top_k,
        intermediate_size=int(raw["moe_intermediate_size"]),
        normalise=bool(raw.get("norm_topk_prob", False)),
        dense_layers=tuple(n for n in range(num_layers) if n in only_dense or (n + 1) % step != 0),
    )


def _gemma_style(raw: Mapping[str, Any], hidden: int) -> LayerStyle:
    return LayerStyle(
        gate="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
        embed_scale=float(hidden) ** 0.5,
        logit_cap=float(raw.get("final_logit_softcapping") or 0.0),
    )
