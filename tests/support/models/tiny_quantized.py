"""Quantise matrices and folders as the formats define it: slow, in Python's numbers, and without any product code.

weight[n][k] = (number - zero) * scale        one scale and zero for each cell: a set of outputs and inputs
"""

from __future__ import annotations

import json
import math
import random
import shutil
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
Cell = tuple[int, int]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def float_values(exponent_bits: int, mantissa_bits: int, bias: int, num_codes: int) -> list[float]:
    """The values of the codes without a sign, by the definition of a small float."""
    values = []
    for code in range(num_codes):
        exponent, mantissa = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        values.append((1 + mantissa) * 2.0 ** (exponent - bias) if exponent else mantissa * 2.0 ** (1 - bias))
    return values


E4M3 = [*float_values(4, 3, 7, 127), math.inf]  # the last code is NaN
E2M1 = float_values(2, 1, 1, 8)


def nearest(values: Sequence[float], wanted: float) -> int:
    """The code of the nearest value; its highest bit is the sign."""
    at = min(bisect_left(values, abs(wanted)), len(values) - 1)
    code = at - 1 if at and abs(wanted) - values[at - 1] < values[at] - abs(wanted) else at
    return code + (len(values) if wanted < 0 else 0)


def code_value(values: Sequence[float], code: int) -> float:
    return -values[code - len(values)] if code >= len(values) else values[code]


@dataclass
class Quantised:
    """`numbers[n][k]`: whole numbers, or codes of `values`. `cell(n, k)`: where its scale and zero are."""

    numbers: list[list[int]]
    scales: dict[Cell, float]
    zeros: dict[Cell, int]
    cell: Callable[[int, int], Cell]
    values: Sequence[float] = ()

    def weight(self) -> torch.Tensor:
        """The definition, in float64, rounded once."""
        rows = []
        for n, row in enumerate(self.numbers):
            plain = [code_value(self.values, code) for code in row] if self.values else row
            cells = [self.cell(n, k) for k in range(len(row))]
            rows.append([(a - self.zeros.get(c, 0)) * self.scales[c] for a, c in zip(plain, cells, strict=True)])
        return torch.tensor(rows, dtype=torch.float64).float()

    def table(self, of: dict[Cell, Any], dtype: torch.dtype) -> torch.Tensor:
        height, width = (1 + max(cell[axis] for cell in self.scales) for axis in (0, 1))
        return torch.tensor([[of.get((r, g), 0) for g in range(width)] for r in range(height)], dtype=dtype)

    def scale_table(self, dtype: torch.dtype) -> torch.Tensor:
        return self.table(self.scales, torch.float64).to(dtype)


def quantise(
    weight: torch.Tensor,
    cell: Callable[[int, int], Cell],
    *,
    bits: int = 8,
    values: Sequence[float] = (),
    asymmetric: bool = False,
    dtype: torch.dtype = torch.float32,
    powers: bool = False,
) -> Quantised:
    """Round each weight to its cell's nearest number. `dtype`: of scales. `powers`: scales are powers of two."""
    members: dict[Cell, list[float]] = {}
    rows = weight.double().tolist()
    for n, row in enumerate(rows):
        for k, value in enumerate(row):
            members.setdefault(cell(n, k), []).append(value)
    largest = (1 << bits) - 1 if asymmetric else (1 << (bits - 1)) - 1
    most = max(filter(math.isfinite, values), default=largest)
    scales, zeros = {}, {}
    for at, found in members.items():
        low, high = min(0.0, *found), max(0.0, *found)
        size = (high - low if asymmetric else max(-low, high)) / most or 1.0
        scales[at] = (
            2.0 ** round(torch.tensor(size).log2().item()) if powers else float(torch.tensor(size, dtype=dtype))
        )
        if asymmetric:
            zeros[at] = round(-low / scales[at])
    whole = Quantised([], scales, zeros, cell, values)
    for n, row in enumerate(rows):
        whole.numbers.append([_number(value, whole, cell(n, k), bits, asymmetric) for k, value in enumerate(row)])
    return whole


def _number(value: float, whole: Quantised, at: Cell, bits: int, asymmetric: bool) -> int:
    if whole.values:
        return nearest(whole.values, value / whole.scales[at])
    least, most = (0, (1 << bits) - 1) if asymmetric else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return min(most, max(least, round(value / whole.scales[at]) + whole.zeros.get(at, 0)))


def words(rows: Sequence[Sequence[int]], bits: int, columns: Sequence[int] = ()) -> torch.Tensor:
    """Pack each row, from the lowest bits up: field i of a word is the word's column `columns[i]`, or else i."""
    per, mask = 32 // bits, (1 << bits) - 1
    packed = []
    for row in rows:
        padded = [*row, *[0] * (-len(row) % per)]
        parts = [padded[at : at + per] for at in range(0, len(padded), per)]
        order = columns or range(per)
        packed.append([sum((part[c] & mask) << (bits * i) for i, c in enumerate(order)) for part in parts])
    return torch.tensor(packed, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def turned(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(row) for row in zip(*rows, strict=True)]


def blocks(height: int, width: int) -> Callable[[int, int], Cell]:
    return lambda n, k: (n // height, k // width)


def groups(size: int) -> Callable[[int, int], Cell]:
    return blocks(1, size)


def shuffled_groups(num_inputs: int, size: int) -> list[int]:
    order = [k // size for k in range(num_inputs)]
    random.Random(num_inputs).shuffle(order)
    return order


WHOLE = 1 << 30  # a block of everything


@dataclass
class Made:
    parts: Parts  # by the last word of their names
    weight: torch.Tensor


def fp8(weight: torch.Tensor, height: int, width: int, scale_name: str, dtype: torch.dtype = torch.float32) -> Made:
    found = quantise(weight, blocks(height, width), values=E4M3, dtype=dtype)
    codes = torch.tensor(found.numbers, dtype=torch.uint8).view(torch.float8_e4m3fn)
    table = found.scale_table(dtype)
    return Made({"weight": codes, scale_name: table.reshape(()) if table.numel() == 1 else table}, found.weight())


def fp8_tensor(weight: torch.Tensor) -> Made:
    made = fp8(weight, WHOLE, WHOLE, "weight_scale")
    made.parts["input_scale"] = torch.tensor(0.25)
    return made


def int8_channels(weight: torch.Tensor) -> Made:
    found = quantise(weight, blocks(1, WHOLE), dtype=torch.bfloat16)
    numbers = torch.tensor(found.numbers, dtype=torch.int8)
    return Made({"weight": numbers, "weight_scale": found.scale_table(torch.bfloat16)}, found.weight())


def compressed(weight: torch.Tensor, bits: int, size: int, asymmetric: bool = False, order: bool = False) -> Made:
    cell, parts, half = groups(size), {}, 1 << (bits - 1)
    if order:
        of = shuffled_groups(weight.shape[1], size)
        cell, parts["weight_g_idx"] = (lambda n, k: (n, of[k])), torch.tensor(of, dtype=torch.int32)
    found = quantise(weight, cell, bits=bits, asymmetric=asymmetric, dtype=torch.bfloat16)
    offset = 0 if asymmetric else half  # the file holds signed numbers + half; asymmetric ones here begin at 0
    parts["weight_packed"] = words([[number + offset for number in row] for row in found.numbers], bits)
    parts["weight_scale"], parts["weight_shape"] = found.scale_table(torch.bfloat16), torch.tensor(weight.shape)
    if asymmetric:
        parts["weight_zero_point"] = words(turned(found.table(found.zeros, torch.int64).tolist()), bits).T.contiguous()
    return Made(parts, found.weight())


def mxfp4(weight: torch.Tensor) -> Made:
    found = quantise(weight, groups(32), values=E2M1, powers=True)
    exponents = found.scale_table(torch.float64).log2() + 127
    pairs = [[row[k] | row[k + 1] << 4 for k in range(0, len(row), 2)] for row in found.numbers]
    parts = {"weight_packed": torch.tensor(pairs, dtype=torch.uint8), "weight_scale": exponents.to(torch.uint8)}
    return Made(parts, found.weight())


def awq(weight: torch.Tensor) -> Made:
    found = quantise(weight, groups(32), bits=4, asymmetric=True, dtype=torch.float16)
    zeros = found.table(found.zeros, torch.int64)
    parts = {
        "qweight": words(turned(found.numbers), 4, AWQ_COLUMNS),
        "qzeros": words(zeros.T.tolist(), 4, AWQ_COLUMNS),
        "scales": found.scale_table(torch.float16).T.contiguous(),
    }
    return Made(parts, found.weight())


def gptq(weight: torch.Tensor, bits: int = 4, less_one: int = 1, order: bool = False) -> Made:
    of = shuffled_groups(weight.shape[1], 32) if order else [k // 32 for k in range(weight.shape[1])]
    found = quantise(weight, lambda n, k: (n, of[k]), bits=bits, asymmetric=True, dtype=torch.float16)
    zeros = [[zero - less_one for zero in row] for row in found.table(found.zeros, torch.int64).T.tolist()]
    assert min(map(min, zeros)) >= 0, "no zero point may wrap"
    parts = {
        "qweight": words(found.numbers, bits).T.contiguous(),
        "qzeros": words(zeros, bits),
        "scales": found.scale_table(torch.float16).T.contiguous(),
        "g_idx": torch.tensor(of, dtype=torch.int32),
    }
    return Made(parts, found.weight())


def group_config(stored: str, inputs: int = 16, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, "actorder": None} | weights}
    if inputs < 16:
        group["input_activations"] = {"num_bits": inputs, "dynamic": True, "strategy": "token", "type": "int"}
    top = {
        "quant_method": "compressed-tensors",
        "format": stored,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    return top | {"config_groups": {"group_0": group}, "kv_cache_scheme": None}


@dataclass
class Format:
    config: dict[str, Any]
    make: Callable[[torch.Tensor], Made]
    name: str  # what Baton calls it


def _int4(**more: Any) -> dict[str, Any]:
    return group_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, **more)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "damp_percent": 0.1}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM", "zero_point": True}
FORMATS = {
    "fp8, one scale": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor, "fp8"),
    "fp8, channels": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        lambda weight: fp8(weight, 1, WHOLE, "weight_scale"),
        "fp8",
    ),
    "fp8, ragged blocks": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]},
        lambda weight: fp8(weight, 24, 40, "weight_scale_inv"),
        "fp8 in blocks of 24 x 40",
    ),
    "W8A8, fp8": Format(
        group_config("float-quantized", 8, num_bits=8, type="float", strategy="channel"),
        lambda weight: fp8(weight, 1, WHOLE, "weight_scale", torch.bfloat16),
        "compressed-tensors W8A8 (float, channel)",
    ),
    "W8A8, int8": Format(
        group_config("int-quantized", 8, num_bits=8, type="int", strategy="channel"),
        int8_channels,
        "compressed-tensors W8A8 (int, channel)",
    ),
    "W8A16": Format(
        group_config("pack-quantized", num_bits=8, type="int", strategy="channel"),
        lambda weight: compressed(weight, 8, WHOLE),
        "compressed-tensors W8A16 (int, channel)",
    ),
    "W4A16": Format(_int4(), lambda weight: compressed(weight, 4, 32), "compressed-tensors W4A16 (int, group)"),
    "W4A16, zero points": Format(
        _int4(symmetric=False),
        lambda weight: compressed(weight, 4, 32, asymmetric=True),
        "compressed-tensors W4A16 (int, group)",
    ),
    "W4A16, act order": Format(
        _int4(actorder="group"),
        lambda weight: compressed(weight, 4, 32, order=True),
        "compressed-tensors W4A16 (int, group)",
    ),
    "compressed MXFP4": Format(
        group_config("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4,
        "compressed-tensors W4A16 (float, group)",
    ),
    "AWQ": Format(_AWQ, awq, "AWQ 4 bits"),
    "GPTQ": Format(_GPTQ, gptq, "GPTQ 4 bits"),
    "GPTQ, second version": Format(
        _GPTQ | {"checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, less_one=0), "GPTQ 4 bits"
    ),
    "GPTQ, 8 bits": Format(_GPTQ | {"bits": 8}, lambda weight: gptq(weight, 8), "GPTQ 8 bits"),
    "GPTQ, act order": Format(
        _GPTQ | {"desc_act": True}, lambda weight: gptq(weight, order=True), "GPTQ 4 bits, act order"
    ),
}


def write_quantised(plain: Path, folder: Path, form: str) -> dict[str, torch.Tensor]:
    """Quantise the projections of a plain folder; return the weights that the definition gives, by their names."""
    shutil.copytree(plain, folder)
    stored: Parts = {}
    meant: Parts = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = tensor
            continue
        made = FORMATS[form].make(tensor)
        meant[name] = made.weight
        stored |= {name.removesuffix("weight") + ending: part for ending, part in made.parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": FORMATS[form].config}))
    return meant
