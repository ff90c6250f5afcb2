"""JSON files of a model's folder that may or may not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.core.errors import ConfigError


def read_json_if_there(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where the file is not there. ConfigError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value
