"""Decide whether our own program or the library transformers runs a model. Loads neither."""

from __future__ import annotations

from shared.config.models.model_folder import ModelFolder
from shared.core import extras
from shared.core.errors import ConfigError
from shared.model.formats.hf_config import HF_ARCHITECTURES

AUTO, OURS, LIBRARY_NAME = "auto", "baton", "transformers"  # values of --model-library


def uses_library(folder: ModelFolder, wanted: str) -> bool:
    """Return whether the library runs the model. Raise ConfigError if it is asked for and can't.

    With "auto" our programs run their own families, because they are faster."""
    if not folder.path.is_dir():
        if wanted == LIBRARY_NAME:
            raise ConfigError(f"--model-library {wanted} reads folders with *.safetensors, not {folder.path}")
        return False
    if wanted == OURS or (wanted == AUTO and folder.architecture in HF_ARCHITECTURES):
        return False
    extras.require("models", f"architecture {folder.architecture}")
    return True
