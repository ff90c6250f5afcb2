"""The names by which requests ask for a model or one of its adapters."""

from __future__ import annotations

from collections.abc import Collection

from shared.config.models.gguf_parts import without_part
from shared.core.errors import ConfigError


def names_of(model: str, served: tuple[str, ...]) -> tuple[str, ...]:
    """Return all names of the model itself; the first is the default. An empty name counts as none."""
    stem = model.rstrip("/").rsplit("/", 1)[-1]
    return tuple(filter(None, served)) or (without_part(stem),)


def check_names(names: tuple[str, ...], adapters: Collection[str]) -> None:
    """Raise ConfigError for a name that is given twice."""
    if len(set(names)) != len(names):
        raise ConfigError(f"--served-model-name gives a name twice: {', '.join(names)}")
    for name in names:
        if name in adapters:
            raise ConfigError(f"--lora {name}=...: that is the model's own name")


def named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path or len(name) > 256:
        raise ConfigError(f"--lora is {text!r}; write NAME=PATH")
    return name, path
