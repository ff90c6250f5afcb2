"""Read a quantised safetensors folder as plain tensors: the same names and shapes that the original model has.

A tensor is widened when it is asked for. The parts in the file say how a matrix is packed, so the lists of modules in
config.json (`ignore`, `targets`, `modules_to_not_convert`) are not needed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shared.core.errors import ConfigError
from shared.kernel.product.block_weights import BlockFormat, BlockWeights, mean_bytes_per_weight
from shared.model.formats.quantized_numbers import (
    Quantized,
    add_one,
    as_blocks,
    fields,
    fp4_numbers,
    powers,
    spread,
    widen,
    widen_looked_up,
)
from shared.model.formats.quantized_scheme import Scheme, scheme_of
from shared.model.formats.tensor_files import FLOATS, UNREAD, TensorFiles
from shared.model.math.config import read_json

NUMBERS, SCALE, ZERO, SHAPE, GROUPS = "numbers", "scale", "zero point", "shape", "g_idx"
FACTOR, DIVISOR = "second scale", "global scale"  # of the whole matrix
TABLE, SCALE_TABLE, SCALE_SCALE, STATE = "quant_map", "nested quant_map", "nested absmax", "quant_state"
WEIGHT = ".weight"
# endings of a matrix's parts, and the ending of the matrix's own name
WITH_SCALES = {
    ".weight_packed": NUMBERS,
    ".weight_scale": SCALE,
    ".weight_scale_inv": SCALE,
    ".weight_zero_point": ZERO,
    ".weight_shape": SHAPE,
    ".weight_g_idx": GROUPS,
    ".weight_global_scale": DIVISOR,
    ".weight_scale_2": FACTOR,
}
OF_BITSANDBYTES = {
    ".absmax": SCALE,
    ".quant_map": TABLE,
    ".nested_absmax": SCALE_SCALE,
    ".nested_quant_map": SCALE_TABLE,
    ".quant_state.bitsandbytes__nf4": STATE,
    ".quant_state.bitsandbytes__fp4": STATE,
}
IN_WORDS = {".qweight": NUMBERS, ".scales": SCALE, ".qzeros": ZERO, ".g_idx": GROUPS}
ENDINGS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "fp8": (WITH_SCALES, WEIGHT),
    "fbgemm_fp8": (WITH_SCALES, WEIGHT),
    "compressed-tensors": (WITH_SCALES, WEIGHT),
    "awq": (IN_WORDS, WEIGHT),
    "gptq": (IN_WORDS, WEIGHT),
    "modelopt": (WITH_SCALES, WEIGHT),
    "bitsandbytes": (OF_BITSANDBYTES, ""),
    "mxfp4": ({"_blocks": NUMBERS, "_scales": SCALE}, ""),
}
FORMATS = {
    NUMBERS: {"I8", "U8", "I32", "F8_E4M3"},
    SCALE: FLOATS | {"U8", "F8_E8M0", "F8_E4M3"},
    ZERO: FLOATS | {"I8", "I32"},
    SHAPE: {"I32", "I64"},
    GROUPS: {"I32", "I64"},
    FACTOR: {"F32"},
    DIVISOR: {"F32"},
    TABLE: {"F32"},
    SCALE_TABLE: {"F32"},
    SCALE_SCALE: {"F32"},
    STATE: {"U8"},
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = Mapping[str, torch.Tensor]


def open_tensors(folder: Path) -> TensorFiles:
    """Open a folder's tensors, quantised or not. Raises ConfigError."""
    scheme = scheme_of(read_json(folder / "config.json"), folder)
    return TensorFiles(folder) if scheme is None else QuantizedFiles(folder, scheme)


class QuantizedFiles(TensorFiles):
    """A folder's tensors, widened. Raises ConfigError for a matrix of other parts than the scheme's."""

    def __init__(self, folder: Path, scheme: Scheme) -> None:
        super().__init__(folder)
        self.scheme = scheme
        endings, own = ENDINGS[scheme.method]
        self._parts: dict[str, dict[str, str]] = {}  # matrix -> part -> name in the file
        plain = set()
        for name in super().names():
            ending = next((one for one in endings if name.endswith(one)), None)
            if ending is not None:
                self._parts.setdefault(name.removesuffix(ending) + own, {})[endings[ending]] = name
            elif not name.endswith(UNREAD):
                plain.add(name)
        for name, parts in self._parts.items():
            if name in plain:
                parts.setdefault(NUMBERS, name)
            self._check_parts(name, parts)
        self._names = frozenset(plain | self._parts.keys())

    def _check_parts(self, name: str, parts: Mapping[str, str]) -> None:
        needed = [NUMBERS, SCALE]
        scales = self.format(parts[SCALE]) if SCALE in parts else ""
        if self.scheme.method == "bitsandbytes":
            needed += [TABLE, STATE, *([SCALE_TABLE, SCALE_SCALE] if scales == "U8" else [])]
        elif scales == "F8_E4M3":
            needed.append(FACTOR if self.scheme.method == "modelopt" else DIVISOR)
        if NUMBERS in parts and self.format(parts[NUMBERS]) == "I32":
            needed.append(ZERO if ENDINGS[self.scheme.method][0] is IN_WORDS else SHAPE)
        lacking = [part for part in needed if part not in parts]
        if lacking:
            raise ConfigError(f"{self.path}: {name} has no {' and no '.join(lacking)}")
        for part, own in parts.items():
            if self.format(own) not in FORMATS[part]:
                raise ConfigError(f"{self.path}: the {part} of {name} is {self.format(own)}")

    def names(self) -> frozenset[str]:
        return self._names

    @functools.cached_property
    def block_format(self) -> BlockFormat | None:
        """Return the format of one matrix's blocks. The others have the same, or stay plain."""
        blocks = self.blocks(min(self._parts, default=""))
        return None if blocks is None else blocks.format

    def bytes_per_weight(self, form: BlockFormat, plain_bytes: float) -> float:
        """Return the matrices' mean bytes per weight. `plain_bytes`: of matrices that are not quantised."""
        matrices = [name for name in self._names if len(self.shape(name)) > 1]
        found = ((math.prod(self.shape(name)), form if name in self._parts else None) for name in matrices)
        return mean_bytes_per_weight(found, plain_bytes)

    def described(self) -> str:
        return self.scheme.name

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return super().shape(name)
        with self._explained(name):
            return self._whole_shape(self._parts[name])

    def _whole_shape(self, parts: Mapping[str, str]) -> tuple[int, ...]:
        size = super().shape(parts[NUMBERS])
        if self.scheme.method == "awq":
            return size[1] * 8, size[0]
        if self.scheme.method == "gptq":
            return size[1], size[0] * 32 // self.scheme.bits[0]
        if self.scheme.method == "mxfp4":
            return size[0], size[2] * 32, size[1]
        if STATE in parts:
            return tuple(self._state(parts)["shape"])
        if SHAPE in parts:
            return tuple(super().tensor(parts[SHAPE]).tolist())
        return (size[0], size[1] * 2) if self.format(parts[NUMBERS]) == "U8" else size

    def as_stored(self, names: Iterable[str]) -> Iterable[str]:
        return (name for name in names if name not in self._parts)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor: a plain one as in the file, a matrix of the scheme in `dtype`. Raises ConfigError."""
        if name not in self._parts:
            return super().tensor(name)
        with self._explained(name):
            out = torch.empty(self.shape(name), dtype=dtype)
            self._widen(self._read(name), out)
        return out

    def _read(self, name: str) -> Parts:
        return {part: super(QuantizedFiles, self).tensor(own) for part, own in self._parts[name].items()}

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"{self.path}: the parts of {name} don't fit each other: {error}") from error

    def _state(self, parts: Mapping[str, str]) -> Mapping[str, Any]:
        """Return what bitsandbytes says of a matrix, as JSON in bytes."""
        state: Mapping[str, Any] = json.loads(bytes(super().tensor(parts[STATE]).tolist()))
        return state

    def blocks(self, name: str) -> BlockWeights | None:
        if name not in self._parts or self.scheme.method in ("mxfp4", "bitsandbytes"):
            return None
        with self._explained(name):
            return as_blocks(self._matrix(self._read(name)))

    def _widen(self, parts: Parts, out: torch.Tensor) -> None:
        if self.scheme.method == "bitsandbytes":
            state = json.loads(bytes(parts[STATE].tolist()))
            return widen_looked_up(
                parts[NUMBERS], parts[TABLE], block_scales(parts, state), int(state["blocksize"]), out
            )
        if self.scheme.method != "mxfp4":
            return widen(self._matrix(parts), out)
        for blocks, scales, part in zip(parts[NUMBERS], parts[SCALE], out, strict=True):  # expert by expert
            widen(spread(fp4_numbers(blocks.flatten(1)), powers(scales)), part.T)
        return None

    def _matrix(self, parts: Parts) -> Quantized:
        if self.scheme.method == "awq":
            return awq_matrix(parts)
        if self.scheme.method == "gptq":
            return gptq_matrix(parts, self.scheme)
        return scaled_matrix(parts, self.scheme)


def scaled_matrix(parts: Parts, scheme: Scheme) -> Quantized:
    """Read fp8 and compressed-tensors: bytes, pairs of FP4 in bytes, or whole numbers in words.

    compressed-tensors packs a signed number as number + 2^(bits - 1), and zero points along the outputs.
    """
    numbers, zeros, bits = parts[NUMBERS], parts.get(ZERO, 0), 8
    if numbers.dtype == torch.int32:
        num_outputs, num_inputs = parts[SHAPE].tolist()
        bits = next((one for one in scheme.bits if -(-num_inputs * one // 32) == numbers.shape[1]), 0)
        if not bits:
            raise ValueError(f"{numbers.shape[1]} words for {num_inputs} inputs")
        numbers = fields(numbers, bits, num_inputs)
        zeros = fields(zeros.T, bits, num_outputs).T if isinstance(zeros, torch.Tensor) else 1 << (bits - 1)
    elif numbers.dtype == torch.uint8:
        numbers = fp4_numbers(numbers)
    matrix = spread(numbers, powers(parts[SCALE]), zeros, parts.get(GROUPS), scheme.block, bits)
    return replace(matrix, factor=parts.get(FACTOR), divisor=parts.get(DIVISOR))


def block_scales(parts: Parts, state: Mapping[str, Any]) -> torch.Tensor:
    """Return bitsandbytes' scales as float32. Bytes are numbers of a table, with scales and an offset of their own."""
    scales = parts[SCALE]
    if scales.dtype != torch.uint8:
        return scales.float()
    at = torch.arange(len(scales)) // int(state["nested_blocksize"])
    return parts[SCALE_TABLE][scales.long()] * parts[SCALE_SCALE][at] + float(state["nested_offset"])


def awq_matrix(parts: Parts) -> Quantized:
    """Words hold eight outputs of one input, in AWQ_ORDER."""
    num_outputs = parts[SCALE].shape[1]
    numbers, zeros = (fields(parts[part], 4, num_outputs, AWQ_ORDER).T for part in (NUMBERS, ZERO))
    return spread(numbers, parts[SCALE].T, zeros, bits=4)


def gptq_matrix(parts: Parts, scheme: Scheme) -> Quantized:
    """Words hold inputs of one output; words of zero points hold outputs. g_idx has each input's group."""
    (bits,) = scheme.bits
    zeros = add_one(parts[ZERO], bits) if scheme.zeros_less_one else parts[ZERO]
    num_outputs = parts[SCALE].shape[1]
    numbers = fields(parts[NUMBERS].T, bits, parts[NUMBERS].shape[0] * 32 // bits)
    return spread(numbers, parts[SCALE].T, fields(zeros, bits, num_outputs).T, parts.get(GROUPS), bits=bits)
