"""Facts about models with an encoder, from JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config.models.json_file import read_json_if_there
from shared.core.errors import ConfigError

FAMILIES = ("t5",)  # values of model_type in config.json
START = "decoder_start_token_id"


def has_encoder(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in FAMILIES


def decoder_start_id(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the token that begins the decoder's text. Raise ConfigError if no token is known.

    Look in the same places as transformers, in the same order."""
    generation = read_json_if_there(folder / "generation_config.json")
    candidates = [generation.get(START), config.get(START), config.get("pad_token_id")]
    index = next((value for value in candidates if value is not None), None)
    if not isinstance(index, int) or index < 0:
        raise ConfigError(f"{folder / 'config.json'}: {START} is {index!r}, so the decoder's text can't begin")
    return index
