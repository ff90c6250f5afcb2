"""Refuse kinds of models that can't be served, by config.json and the library's classes: no weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, PreTrainedConfig

from shared.core.errors import ConfigError
from shared.model.library.text_part import text_only

LIBRARY_VERSION = f"transformers {transformers.__version__}"
# Kinds that no text alone, or no page, can serve, and why.
NOT_SERVED = {
    "diffusion_gemma": "writes whole blocks of text, not one token after another",
    "idefics": "reads an image in every layer",
    "kosmos-2": "makes its masks in a way of its own, which can't read pages",
    "kosmos-2.5": "counts positions in a way of its own",
    "moshi": "answers otherwise over pages than by itself, which the check at load does not notice",
    "paligemma": "reads a prompt in both directions",
    "pi0": "moves robots",
    "shieldgemma2": "judges images",
}
# kinds of layers that keep nothing but a token's keys and values, and the key of an indexer
IN_PAGES = ("chunked_attention", "full_attention", "indexed_attention", "sliding_attention")
ANSWERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of names of networks that make texts


def network_kind(config: PreTrainedConfig) -> Any:
    """Return the library's class of networks that answer a text; None if there is none.

    Of one that also sees images or hears, it has the text part alone."""
    kind, has_parts = type(config), config.get_text_config() is not config
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING and not (has_parts and kind in MODEL_FOR_MULTIMODAL_LM_MAPPING):
        return MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING and not config.is_encoder_decoder:
        whole: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[kind]
        return text_only(whole)
    return None


def check_kind(folder: Path, config: PreTrainedConfig) -> None:
    """Raise ConfigError, in one sentence, for a kind of model that can't be served."""
    name = config.model_type
    kind = network_kind(config)
    if kind is None or config.is_encoder_decoder:
        raise ConfigError(f"{folder}: {LIBRARY_VERSION} has no text model of type {name}")
    if name in NOT_SERVED:
        raise ConfigError(f"{folder}: {name} {NOT_SERVED[name]}")
    made_as = config.architectures or [kind.__name__]
    if not any(one.endswith(ANSWERS) or one == kind.__name__ for one in made_as):
        raise ConfigError(f"{folder}: {made_as[0]} is not a network that continues a text")
    if getattr(kind, "_is_stateful", False):
        raise ConfigError(f"{folder}: {name} keeps a state beside keys and values, which pages can't hold")
    strange = sorted({*(getattr(config.get_text_config(), "layer_types", None) or ())} - {*IN_PAGES})
    if strange:
        raise ConfigError(
            f"{folder}: {name} has layers of kind {', '.join(strange)}; pages hold only keys and values of "
            f"{', '.join(IN_PAGES)}"
        )
    if not (kind._supports_attention_backend or kind._supports_sdpa):  # StableLm forgets the first
        raise ConfigError(f"{folder}: the layers of {name} attend in a way of their own, which can't read pages")
