"""Notices when a model's files change while this node computes with their mapped pages.

Weights that need no conversion stay in the mapped files. A file that another one replaces by its name stays as it is
for each process that has mapped it. A file that is written in place changes the weights under running steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from shared.config.models.gguf_parts import part_names
from shared.config.models.model_path import ModelKind, resolve_model
from shared.config.settings.settings import SpecConfig
from shared.core.errors import ModelChanged
from shared.model.library.mapped_tensors import own_mappings

Stamp = tuple[int, int, int, int]  # device, inode, size in bytes, time of the last change in ns


class ModelFiles:
    """Make it before the files are read, so that no change is missed."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._stamps = {os.path.realpath(path): stamp_of(os.path.realpath(path)) for path in paths}

    def keep_mapped(self) -> None:
        """Call this after loading: only mapped files are watched from now on. Raises ModelChanged."""
        self.check_unchanged()
        mapped = {path for path, _ in own_mappings()}
        self._stamps = {path: stamp for path, stamp in self._stamps.items() if path in mapped}

    def check_unchanged(self) -> None:
        """Raise ModelChanged. The system sets a file's time before it changes a byte. So results that are there before
        this call came from unchanged weights. Takes 2 us per file."""
        for path, stamp in self._stamps.items():
            found = stamp_of(path)
            if found != stamp and found[:2] == stamp[:2]:  # else the path leads to another file, or nowhere
                raise ModelChanged(
                    f"{path} was written while this node used it, so its weights are no longer the loaded ones; "
                    "start the node again, and next time write new files beside the old ones, then rename them"
                )


def files_of_model(model: str, spec: SpecConfig) -> list[Path]:
    """Return the files with weights of the model and of a draft head that is a folder of the user's. Raises
    ConfigError."""
    source = resolve_model(model)
    if source.path is None:
        return []
    is_folder = source.kind is ModelKind.HF_FOLDER
    files = folder_files(source.path) if is_folder else list(map(Path, part_names(str(source.path))))
    has_own_head = spec.spec == "eagle" and spec.spec_head != "auto"
    return files + (folder_files(Path(spec.spec_head).expanduser()) if has_own_head else [])


def folder_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def stamp_of(path: str) -> Stamp:
    """Return zeros if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0, 0
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
