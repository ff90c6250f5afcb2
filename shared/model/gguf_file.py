"""Read tensors of a GGUF file under our own names, as numbers or in the file's blocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import xxhash

from shared.core.errors import ConfigError
from shared.kernel.block_weights import BlockFormat, BlockWeights, codes_format, has_codes
from shared.model.config import LlamaConfig, config_from_gguf
from shared.model.gguf_blocks import LAYOUTS, blocks_of
from shared.model.tensor_shapes import check_tensors, tensor_shapes

ROWS_TOGETHER = 64
AMX_INPUTS = 64
SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o_bias": "attn_output.bias",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
MODEL_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "rope_factors": "rope_freqs.weight",
}


class GgufFile:
    """A TensorSource over one memory-mapped file, read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _HeaderReader(str(path))
        except (OSError, ValueError, LookupError, ArithmeticError, TypeError) as error:
            raise ConfigError(f"can't read {path} as GGUF: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._check_types()
        if "token_embd.weight" not in self._tensors:
            raise ConfigError(f"{path} has no token_embd.weight: not a language model's weights")
        vocab_size = int(self._tensors["token_embd.weight"].shape[1])
        tied = "output.weight" not in self._tensors
        biases = tuple(name for name in ("q", "k", "v", "o") if _gguf_name(f"layers.0.{name}_bias") in self._tensors)
        try:
            self.config: LlamaConfig = config_from_gguf(_plain_fields(reader), vocab_size, tied, biases)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"{path}: wrong field in the header: {error}") from error
        self._check_tensors()

    def _check_types(self) -> None:
        for name, tensor in self._tensors.items():
            if tensor.tensor_type.name not in SUPPORTED_TYPES:
                kind = tensor.tensor_type.name
                raise ConfigError(f"{self.path}: {name} is {kind}, supported are {', '.join(SUPPORTED_TYPES)}")

    def _check_tensors(self) -> None:
        wanted = {_gguf_name(name): shape for name, shape in tensor_shapes(self.config).items()}
        if self.has("rope_factors"):
            wanted[MODEL_NAMES["rope_factors"]] = (self.config.head_dim // 2,)
        found = {name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in self._tensors.items()}
        check_tensors(self.path, self.config.family, wanted, found)

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as float32, rows first (out, in). Rotary pairs are split into halves, as in Hugging Face."""
        found = self._tensors.get(_gguf_name(name))
        if found is None:
            raise ConfigError(f"{self.path} has no tensor {_gguf_name(name)}")
        values = dequantize(found.data, found.tensor_type)
        heads = self._rotary_heads(name)
        if heads:
            values = split_rotary_halves(values, heads)
        if not values.flags.writeable:
            values = values.copy()
        return torch.from_numpy(values)

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
        matrices = self._matrices
        sizes = list(map(_size, matrices))
        forms = [_recoded(tensor) if in_codes else _form_of(tensor) for tensor in matrices]
        each = [plain_bytes if form is None else form.bytes_per_weight for form in forms]
        return sum(size * one for size, one in zip(sizes, each, strict=True)) / sum(sizes)

    def blocks(self, name: str) -> BlockWeights | None:
        """Return the matrix in the file's blocks, or None for plain numbers."""
        found = self._tensors[_gguf_name(name)]
        blocks = blocks_of(found.data.view(np.ndarray), found.tensor_type.name)
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
        return f"GGUF {', '.join(kinds)}", self.path.stat().st_size

    def content_hash(self) -> str:
        """Hash the whole file: up to a second per 5 GB, if the file is in the page cache."""
        return hash_files((self.path,))


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


def _gguf_name(name: str) -> str:
    """Return the name in the file: token_embd.weight for embed, blk.3.attn_q.weight for layers.3.q."""
    if not name.startswith("layers."):
        return MODEL_NAMES[name]
    _, layer, kind = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES[kind]}"


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


def _plain_fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    array = gguf.GGUFValueType.ARRAY
    return {key: field.contents() for key, field in reader.fields.items() if field.types[0] != array}
