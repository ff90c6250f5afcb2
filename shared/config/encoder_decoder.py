"""What router and nodes must read alike in the folder of a model with an encoder. JSON only, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.core.errors import ConfigError

FAMILIES = ("t5",)  # by config.json's model_type
START = "decoder_start_token_id"


def has_encoder(folder: Path) -> bool:
    """Whether it is the folder of a model whose prompts are read by an encoder."""
    return _read(folder / "config.json").get("model_type") in FAMILIES


def decoder_start_id(folder: Path) -> int:
    """The token that begins the decoder's text. generation_config.json first, as transformers does; then config.json,
    which may leave it to the padding token. ConfigError where none says it."""
    config = _read(folder / "config.json")
    told = [_read(folder / "generation_config.json").get(START), config.get(START), config.get("pad_token_id")]
    index = next((value for value in told if value is not None), None)
    if not isinstance(index, int) or index < 0:
        raise ConfigError(f"{folder / 'config.json'}: {START} is {index!r}, so the decoder's text can't begin")
    return index


def _read(path: Path) -> Mapping[str, Any]:
    """{} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value
