"""Read a folder's *.safetensors files by the tensors' own names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shared.core.errors import ConfigError
from shared.kernel.product.block_weights import BlockWeights
from shared.model.formats.gguf_file import hash_files

FLOATS = frozenset(["F32", "F16", "BF16", "F64"])
# scales of inputs, outputs, keys and values: nothing here rounds these
UNREAD = tuple(
    f".{of}_{what}"
    for of in ("input", "output", "activation", "q", "k", "v")
    for what in ("scale", "scale_ub", "zero_point", "global_scale")
)
TWICE = "consolidated"
SCALED = ("F8", "F4", "I8")  # beginnings of number formats


def files_of(folder: Path) -> tuple[Path, ...]:
    """Return the files with the weights. Mistral publishes them twice, in `consolidated` files under other names."""
    files = sorted(folder.glob("*.safetensors"))
    return tuple(path for path in files if not path.name.startswith(TWICE)) or tuple(files)


class TensorFiles:
    """A folder's tensors by name.

    The safetensors library checks that tensors lie in their files and don't overlap.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.files = files_of(folder)
        if not self.files:
            raise ConfigError(f"{folder} has no *.safetensors file")
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._formats: dict[str, str] = {}
        for path in self.files:
            try:
                self._read_header(path)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"can't read {path}: {error}") from error

    def _read_header(self, path: Path) -> None:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118, not a dictionary
                if name in self._where:
                    raise ConfigError(f"{self.path}: tensor {name} is in {self._where[name].name} and in {path.name}")
                header = shard.get_slice(name)
                self._where[name], self._shapes[name] = path, tuple(header.get_shape())
                self._formats[name] = header.get_dtype()

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def file_of(self, name: str) -> Path:
        return self._where[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def format(self, name: str) -> str:
        """Return the number format of a tensor in the file, as safetensors names it."""
        return self._formats[name]

    def described(self) -> str:
        """Name the number format for people."""
        return ", ".join(sorted(set(self._formats.values())))

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def num_numbers(self, names: Iterable[str] | None = None) -> int:
        """Return how many numbers the tensors hold together; by default all."""
        return sum(math.prod(self.shape(name)) for name in (self.names() if names is None else names))

    def as_stored(self, names: Iterable[str]) -> Iterable[str]:
        """Return the tensors that are read as they are in the file: here all."""
        return names

    def check_floats(self, names: Iterable[str]) -> None:
        """Raise ConfigError for tensors of integers or bytes, because their scales are not read."""
        for name in sorted(self.as_stored(names)):
            if self._formats[name] not in FLOATS:
                raise ConfigError(f"{self.path}: tensor {name} is {self._formats[name]}, only floats are supported")

    def check_scales(self, names: Iterable[str]) -> None:
        """Raise ConfigError for numbers that mean nothing without scales, which are not read."""
        for name in sorted(self.as_stored(names)):
            if self._formats[name].startswith(SCALED):
                raise ConfigError(f"{self.path}: tensor {name} is {self._formats[name]}, and config.json has no scheme")

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the file's dtype, rows first (out, in). Raises ConfigError."""
        if name not in self._where:
            raise ConfigError(f"{self.path} has no tensor {name}")
        with safe_open(self._where[name], framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
        return tensor

    def blocks(self, name: str) -> BlockWeights | None:
        """Return a matrix in blocks, or None for plain numbers."""
        return None

    def content_hash(self) -> str:
        """Hash the tensors, config.json, generation_config.json, which may set stop ids, and a scheme's own file."""
        described = (self.path / name for name in ("config.json", "generation_config.json", "hf_quant_config.json"))
        return hash_files((*filter(Path.is_file, described), *self.files))
