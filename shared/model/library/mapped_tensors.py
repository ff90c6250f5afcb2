"""Give the library a folder's tensors as they lie in the mapped files, each when it is asked for.

Such a tensor takes no memory of its own, and all processes share its pages. The library uses most tensors as they lie,
but merges those of experts. A file's pages leave memory when the last tensor of a mapping is gone. So tensors that are
merged have mappings of their own, and no expert is in memory twice.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shared.model.formats.tensor_files import TensorFiles

Own = Callable[[str, torch.Tensor], torch.Tensor]
MAPS = Path("/proc/self/maps")


def as_read(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class FileMapping:
    """Maps `path` when the first of the tensors `names` is asked for. With all of them gone, the mapping ends."""

    def __init__(self, path: Path, names: set[str]) -> None:
        self._path, self._left = path, set(names)
        self._lock = threading.Lock()  # the library reads in several threads
        self._file: Any = None

    def take_tensor(self, name: str) -> torch.Tensor:
        with self._lock:
            if self._file is None:
                self._file = safe_open(self._path, framework="pt").__enter__()
            tensor: torch.Tensor = self._file.get_tensor(name)
            self._left.discard(name)
            if not self._left:
                self._file = None  # from now on only tensors keep the mapping
        return tensor


class LateTensor:
    """What the library takes for a slice of a file: an index reads it."""

    def __init__(self, read: Callable[[str], torch.Tensor], name: str, own: Own) -> None:
        """`own`: returns the part that this process keeps."""
        self._read, self._name, self._own = read, name, own
        self.is_read = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.is_read = True
        return self._own(self._name, self._read(self._name))[index]


def mapped_tensors(files: TensorFiles, names: Iterable[str], own: Own = as_read) -> dict[str, LateTensor]:
    """Return tensors by name. Raises nothing: a file that can't be read is noticed when it is.

    `own`: returns the part of a tensor that this process keeps."""
    alike: dict[tuple[Path, str], set[str]] = defaultdict(set)
    for name in names:
        alike[files.file_of(name), merged_name(name)].add(name)
    kept: dict[tuple[Path, str], set[str]] = defaultdict(set)
    for (path, merged), group in alike.items():
        kept[path, merged if len(group) > 1 else ""] |= group
    found = {}
    for (path, _), group in kept.items():
        mapping = FileMapping(path, group)
        found.update({name: LateTensor(mapping.take_tensor, name, own) for name in group})
    return found


def mapped_bytes(network: torch.nn.Module, files: TensorFiles) -> int:
    """Return how many bytes of the network's weights lie in the mapped files. 0 where the system doesn't tell."""
    paths = {str(path.resolve()) for path in files.files}
    ranges = [bounds for path, bounds in own_mappings() if path in paths]
    places = {weight.data_ptr(): weight.nbytes for weight in network.parameters()}
    return sum(size for place, size in places.items() if any(first <= place < end for first, end in ranges))


def own_mappings() -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield path, first address and end of each file that this process has mapped."""
    if not MAPS.exists():
        return
    for line in MAPS.read_text("utf-8", "replace").splitlines():
        bounds, *_, path = line.split(maxsplit=5)
        first, _, end = bounds.partition("-")
        yield path, (int(first, 16), int(end, 16))


def merged_name(name: str) -> str:
    """Return the name that all tensors have that differ in their last number only.

    model.layers.3.mlp.experts.5.up_proj.weight -> model.layers.3.mlp.experts.#.up_proj.weight"""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    if len(numbers) > 1:
        parts[numbers[-1]] = "#"
    return ".".join(parts)
