"""Read tensors of a GGUF file under our own names, as numbers or in the file's blocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import xxhash

from shared.config.models.gguf_metadata import read_pairs
from shared.config.models.gguf_parts import part_names
from shared.core.errors import ConfigError
from shared.kernel.product.block_weights import (
    BlockFormat,
    BlockWeights,
    codes_format,
    has_codes,
    mean_bytes_per_weight,
)
from shared.model.formats.gguf_blocks import LAYOUTS, blocks_of
from shared.model.formats.gguf_config import FileFacts, config_from_gguf
from shared.model.formats.gguf_names import (
    LONG_FACTORS,
    MODEL_NAMES,
    ROPE_FACTORS,
    SHORT_FACTORS,
    TensorPlace,
    file_name,
    places_of,
)
from shared.model.formats.tensor_shapes import check_tensors
from shared.model.math.config import LlamaConfig

ROWS_TOGETHER = 64
AMX_INPUTS = 64


class GgufFile:
    """A TensorSource over one memory-mapped file, read on demand."""

    def __init__(self, path: Path, max_context: int = 0) -> None:
        """`path`: the file, or one of several. `max_context`: the context that is wanted (0: the model's), since
        Phi 3 has two sets of rotary factors."""
        self.path = path
        self.parts = tuple(map(Path, part_names(str(path))))
        readers = [_reader(part) for part in self.parts]
        self._check_parts(readers)
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self._check_types()
        if MODEL_NAMES["embed"] not in self._tensors:
            raise ConfigError(f"{path} has no {MODEL_NAMES['embed']}: not a language model's weights")
        facts = FileFacts(
            vocab_size=int(self._tensors[MODEL_NAMES["embed"]].shape[1]),
            tied=MODEL_NAMES["head"] not in self._tensors,
            biases=tuple(name for name in "qkvo" if file_name(f"layers.0.{name}_bias") in self._tensors),
        )
        try:
            # merges and scores are not needed here, and long
            pairs = read_pairs(self.parts[0], lambda key: not key.endswith((".merges", ".scores")))
            self.config: LlamaConfig = config_from_gguf(pairs, facts)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"{path}: wrong field in the header: {error}") from error
        self._has_long_context = (max_context or self.config.max_context) > self.config.rope.original_context
        self._places, shapes = places_of(self.config)
        self._check_tensors(shapes)

    def _check_parts(self, readers: list[gguf.GGUFReader]) -> None:
        """Raise ConfigError if the parts are not those of one model."""
        for n, (part, reader) in enumerate(zip(self.parts, readers, strict=True)):
            number, count = (_number(reader, key, default) for key, default in (("split.no", 0), ("split.count", 1)))
            if (number, count) != (n, len(readers)) and max(count, len(readers)) > 1:
                raise ConfigError(f"{part} says that it is part {number + 1} of {count}, and its name says otherwise")

    def _check_types(self) -> None:
        for kind in {tensor.tensor_type for tensor in self._tensors.values()}:
            if not is_readable(kind):
                name = next(name for name, tensor in self._tensors.items() if tensor.tensor_type == kind)
                raise ConfigError(f"{self.path}: {name} is {kind.name}, which the gguf package can't read as numbers")

    def _check_tensors(self, wanted: dict[str, tuple[int, ...]]) -> None:
        factors = (self.config.head_dim // 2,)
        if self.config.family == "phi3" and not {SHORT_FACTORS, LONG_FACTORS}.isdisjoint(self._tensors):
            wanted |= {SHORT_FACTORS: factors, LONG_FACTORS: factors}
            self._places["rope_factors"] = TensorPlace(LONG_FACTORS if self._has_long_context else SHORT_FACTORS)
        elif self.config.family == "llama" and ROPE_FACTORS in self._tensors:
            wanted[ROPE_FACTORS] = factors
            self._places["rope_factors"] = TensorPlace(ROPE_FACTORS)
        found = {name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in self._tensors.items()}
        check_tensors(self.path, self.config.family, wanted, found)

    def has(self, name: str) -> bool:
        return name in self._places

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as float32, rows first (out, in). Rotary pairs are split into halves, as in Hugging Face."""
        data, kind = self._data(name)
        values = dequantize(data, kind)
        heads = self._rotary_heads(name)
        if heads:
            values = split_rotary_halves(values, heads)
        if not values.flags.writeable:
            values = values.copy()
        return torch.from_numpy(values)

    def _data(self, name: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        place = self._places.get(name)
        if place is None:
            raise ConfigError(f"{self.path} has no tensor {name}")
        found = self._tensors[place.tensor]
        return found.data.view(np.ndarray)[place.first : place.end], found.tensor_type

    @property
    def has_blocks(self) -> bool:
        return any(tensor.tensor_type.name in LAYOUTS for tensor in self._tensors.values())

    @property
    def _matrices(self) -> list[gguf.ReaderTensor]:
        return [tensor for tensor in self._tensors.values() if len(tensor.shape) > 1]

    @property
    def has_codes(self) -> bool:
        """Return whether AMX can multiply codes for most weights."""
        matrices = self._matrices
        found = [one for one in matrices if has_codes(_form_of(one)) and one.shape[0] % AMX_INPUTS == 0]
        return 2 * sum(map(_size, found)) > sum(map(_size, matrices))

    def bytes_per_weight(self, plain_bytes: int, in_codes: bool = False) -> float:
        """Return the matrices' mean bytes per weight. `plain_bytes`: bytes per weight without blocks."""
        form_of = _recoded if in_codes else _form_of
        return mean_bytes_per_weight(((_size(tensor), form_of(tensor)) for tensor in self._matrices), plain_bytes)

    def blocks(self, name: str) -> BlockWeights | None:
        """Return the matrix in the file's blocks, or None for plain numbers."""
        data, kind = self._data(name)
        blocks = blocks_of(data, kind.name)
        heads = self._rotary_heads(name)
        if blocks is None or not heads:
            return blocks
        order = split_rotary_halves(np.arange(blocks.shape[0]), heads)
        return blocks.take_rows(torch.from_numpy(order))

    def _rotary_heads(self, name: str) -> int:
        """Return the number of heads whose rotary pairs lie side by side in the file."""
        kind = name.rpartition(".")[2]
        if self.config.family != "llama" or kind not in ("q", "q_bias", "k", "k_bias"):
            return 0
        return self.config.num_heads if kind.startswith("q") else self.config.num_kv_heads

    def stored(self) -> tuple[str, int]:
        kinds = sorted({tensor.tensor_type.name for tensor in self._matrices})
        return f"GGUF {', '.join(kinds)}", sum(part.stat().st_size for part in self.parts)

    def content_hash(self) -> str:
        """Hash all files: up to a second per 5 GB, if they are in the page cache. Add which rotary factors are used,
        because keys differ with them."""
        is_long = self._places.get("rope_factors") == TensorPlace(LONG_FACTORS)
        return hash_files(self.parts) + (" long rope" if is_long else "")


def _reader(path: Path) -> gguf.GGUFReader:
    try:
        return _HeaderReader(str(path))
    except (OSError, ValueError, LookupError, ArithmeticError, TypeError) as error:
        raise ConfigError(f"can't read {path} as GGUF: {error}") from error


def _number(reader: gguf.GGUFReader, key: str, default: int) -> int:
    field = reader.get_field(key)
    value = default if field is None else field.contents()
    if not isinstance(value, int):
        raise ConfigError(f"the GGUF header's {key} is {type(value).__name__}, not a number")
    return value


def is_readable(kind: gguf.GGMLQuantizationType) -> bool:
    """Return whether the gguf package can dequantize the type, by trying it on one block."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _size(tensor: gguf.ReaderTensor) -> int:
    return int(np.prod(tensor.shape))


def _form_of(tensor: gguf.ReaderTensor) -> BlockFormat | None:
    found = LAYOUTS.get(tensor.tensor_type.name)
    return None if found is None else found[0]


def _recoded(tensor: gguf.ReaderTensor) -> BlockFormat | None:
    return codes_format(int(tensor.shape[0]), has_codes(_form_of(tensor)))


def dequantize(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return `data` as float32, in the same rows.

    The gguf package decodes sixteen rows at a time, and slices memory maps slowly. So it gets a plain array of joined
    rows.
    """
    rows = data.view(np.ndarray)
    together = math.gcd(len(rows), ROWS_TOGETHER) if rows.ndim == 2 else 1
    merged = rows.reshape(len(rows) // together, -1) if together > 1 else rows
    values = gguf.quants.dequantize(merged, kind)
    shape = (len(rows), -1) if rows.ndim == 2 else values.shape
    return np.ascontiguousarray(values, dtype=np.float32).reshape(shape)


def split_rotary_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Split the rotated pairs of q and k, which llama files store side by side, into halves.

    per head:  file  x0 y0 x1 y1 ...   ->   x0 x1 ... y0 y1 ...
    """
    pairs = weight.shape[0] // num_heads // 2
    split = weight.reshape(num_heads, pairs, 2, *weight.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(split).reshape(weight.shape)


def hash_files(paths: tuple[Path, ...]) -> str:
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(path.name.encode() if len(paths) > 1 else b"")
        with path.open("rb") as file:
            while block := file.read(16 << 20):
                digest.update(block)
    return digest.hexdigest()


class _HeaderReader(gguf.GGUFReader):
    """Skips arrays (vocabulary, merges), which take the reader two seconds.

    If a later version of the package does not call `_get_field_parts`, reading is slower but right.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if gguf.GGUFValueType(raw_type) != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        (item_type,), (length,) = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        size = 12 + self._items_bytes(orig_offs + 12, gguf.GGUFValueType(item_type), int(length))
        return size, [], [], [gguf.GGUFValueType.ARRAY]

    def _items_bytes(self, offset: int, kind: gguf.GGUFValueType, length: int) -> int:
        if kind in self.gguf_scalar_to_np:
            return length * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        if kind != gguf.GGUFValueType.STRING:
            raise ValueError(f"an array of {kind.name} in the header")
        data, at = self.data.data, offset
        for _ in range(length):
            if at >= len(data):
                raise ValueError(f"an array of {length} strings reaches past the end")
            at += 8 + int.from_bytes(data[at : at + 8], "little")
        return at - offset
