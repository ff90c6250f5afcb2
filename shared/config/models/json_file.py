"""Read JSON files that may be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.core.errors import ConfigError


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; {} without a file. Raise ConfigError for other contents."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
