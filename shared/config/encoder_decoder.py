"""What router and nodes must read alike in the folder of a model with an encoder. JSON only, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config.json_file import read_json_if_there
from shared.core.errors import ConfigError

FAMILIES = ("t5",)  # by config.json's model_type
START = "decoder_start_token_id"


def has_encoder(config: Mapping[str, Any]) -> bool:
    """Whether it is the config.json of a model whose prompts are read by an encoder."""
    return config.get("model_type") in FAMILIES


def decoder_start_id(folder: Path, config: Mapping[str, Any]) -> int:
    """The token that begins the decoder's text. generation_config.json first, as transformers does; then `config`,
    config.json, which may leave it to the padding token. ConfigError where none says it."""
    generation = read_json_if_there(folder / "generation_config.json")
    told = [generation.get(START), config.get(START), config.get("pad_token_id")]
    index = next((value for value in told if value is not None), None)
    if not isinstance(index, int) or index < 0:
        raise ConfigError(f"{folder / 'config.json'}: {START} is {index!r}, so the decoder's text can't begin")
    return index
