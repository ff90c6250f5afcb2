"""Decide whether our own program or the library transformers runs a model, by config.json alone. Loads neither."""

from __future__ import annotations

from shared.config.models.model_folder import ModelFolder
from shared.core import extras
from shared.core.errors import ConfigError
from shared.model.formats.config_fields import NotOurs
from shared.model.formats.hf_config import HF_ARCHITECTURES, config_from_hf

AUTO, OURS, LIBRARY_NAME = "auto", "baton", "transformers"  # values of --model-library


def uses_library(folder: ModelFolder, wanted: str) -> bool:
    """Return whether the library runs the model. Raise ConfigError if it is asked for and can't.

    With "auto" our programs run the folders that they know, because they are faster."""
    if not folder.path.is_dir():
        if wanted == LIBRARY_NAME:
            raise ConfigError(f"--model-library {wanted} reads folders with *.safetensors, not {folder.path}")
        return False
    if wanted == OURS:
        return False
    is_known, reason = folder.architecture in HF_ARCHITECTURES, why_not_ours(folder)
    if wanted == AUTO and is_known and not reason:
        return False
    extras.require("models", f"architecture {folder.architecture}" + f" ({reason})" * bool(reason))
    return True


def why_not_ours(folder: ModelFolder) -> str:
    """Return what in config.json keeps the folder's own family here from running it; "" for other families.

    Also "" for a file that is wrong for any program."""
    if folder.architecture not in HF_ARCHITECTURES:
        return ""
    try:
        config_from_hf(folder)
    except NotOurs as error:
        return error.reason
    except ConfigError:
        return ""
    return ""


def described(folder: ModelFolder) -> str:
    """Name the folder, and say why the library runs it although its family is ours."""
    reason = why_not_ours(folder)
    return f"{folder.path.name}: {reason}" if reason else folder.path.name
