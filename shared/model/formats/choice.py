"""Decide whether our own program or the library transformers runs a model. Loads neither."""

from __future__ import annotations

from pathlib import Path

from shared.config.models.json_file import read_json_if_there
from shared.core import extras
from shared.core.errors import ConfigError
from shared.model.formats.hf_config import HF_ARCHITECTURES

AUTO, OURS, LIBRARY_NAME = "auto", "baton", "transformers"  # values of --model-library


def uses_library(path: Path, wanted: str) -> bool:
    """Return whether the library runs the model at `path`. Raise ConfigError if it is asked for and can't.

    With "auto" our programs run their own families, because they are faster."""
    if not path.is_dir():
        if wanted == LIBRARY_NAME:
            raise ConfigError(f"--model-library {wanted} reads folders with *.safetensors, not {path}")
        return False
    architecture = architecture_of(path)
    if wanted == OURS or (wanted == AUTO and architecture in HF_ARCHITECTURES):
        return False
    extras.require("models", f"architecture {architecture}")
    return True


def architecture_of(folder: Path) -> str:
    config = read_json_if_there(folder / "config.json")
    return str((config.get("architectures") or [config.get("model_type") or "?"])[0])
