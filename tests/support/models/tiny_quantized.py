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


def nvfp4(weight: torch.Tensor, whole: float, packed: str, **names: torch.Tensor) -> Made:
    """Groups of 16 with E4M3 scales. `whole`: the factor of all weights. `names`: its part, as the file has it."""
    pairs, codes, rows = [], [], []
    for row in weight.double().tolist():
        parts = [row[at : at + 16] for at in range(0, len(row), 16)]
        own = [nearest(E4M3, max(map(abs, part)) / 6 / whole) for part in parts]
        numbers = [nearest(E2M1, x / (E4M3[c] * whole or 1)) for part, c in zip(parts, own, strict=True) for x in part]
        rows.append([code_value(E2M1, number) * E4M3[own[k // 16]] * whole for k, number in enumerate(numbers)])
        pairs.append([numbers[k] | numbers[k + 1] << 4 for k in range(0, len(numbers), 2)])
        codes.append(own)
    scales = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)
    parts_of = {packed: torch.tensor(pairs, dtype=torch.uint8), "weight_scale": scales}
    return Made(parts_of | names, torch.tensor(rows, dtype=torch.float64).float())


def nvfp4_compressed(weight: torch.Tensor, divisor: float = 3001.7) -> Made:
    whole = torch.tensor([divisor])
    return nvfp4(weight, 1 / whole.double().item(), "weight_packed", weight_global_scale=whole)


def nvfp4_modelopt(weight: torch.Tensor) -> Made:
    whole, inputs = torch.tensor(0.000317), torch.tensor(0.02)
    return nvfp4(weight, whole.double().item(), "weight", weight_scale_2=whole, input_scale=inputs)


# QLoRA (arXiv 2305.14314): quantiles of a normal distribution, as float32
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
BLOCK, BLOCK_OF_SCALES = 48, 5  # of weights and of scales: rows begin within blocks


def as_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def bitsandbytes(weight: torch.Tensor, kind: str, nested: bool = False) -> Made:
    """Blocks are counted through all rows; the first number of a pair has the higher four bits."""
    table = [as_float32(value) for value in (NF4 if kind == "nf4" else (*_FP4, *(-value for value in _FP4)))]
    flat = weight.double().flatten().tolist()
    scales = [as_float32(max(map(abs, flat[at : at + BLOCK]))) for at in range(0, len(flat), BLOCK)]
    state = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {"weight.quant_map": torch.tensor(table)}
    if nested:
        scales = _nested(scales, parts, state)
    else:
        parts["weight.absmax"] = torch.tensor(scales)
    numbers, meant = [], []
    for i, value in enumerate(flat):
        scale = scales[i // BLOCK]
        numbers.append(min(range(16), key=lambda n: abs(table[n] * scale - value)))
        meant.append(table[numbers[-1]] * scale)
    pairs = [[numbers[i] << 4 | numbers[i + 1]] for i in range(0, len(numbers), 2)]
    parts["weight"] = torch.tensor(pairs, dtype=torch.uint8)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = text
    return Made(parts, torch.tensor(meant, dtype=torch.float64).float().view(weight.shape))


def _nested(scales: list[float], parts: Parts, state: dict[str, Any]) -> list[float]:
    """Quantise the scales themselves: a table's value times a scale, then plus an offset, each rounded to float32."""
    table = [as_float32((n - 127) / 128) for n in range(256)]
    offset = as_float32(sum(scales) / len(scales))
    size = BLOCK_OF_SCALES
    most = [as_float32(max(abs(s - offset) for s in scales[at : at + size])) for at in range(0, len(scales), size)]
    codes, read = [], []
    for i, scale in enumerate(scales):
        own = most[i // size]
        codes.append(min(range(256), key=lambda n: abs(table[n] * own + offset - scale)))
        read.append(as_float32(as_float32(table[codes[-1]] * own) + offset))
    state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
    parts["weight.absmax"] = torch.tensor(codes, dtype=torch.uint8)
    parts["weight.nested_absmax"], parts["weight.nested_quant_map"] = torch.tensor(most), torch.tensor(table)
    return read


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


def _bnb(kind: str, nested: bool) -> dict[str, Any]:
    own = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8"}
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False} | own


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
    "NVFP4, compressed": Format(
        group_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4_compressed,
        "compressed-tensors W4A16 (float, tensor_group)",
    ),
    "NVFP4, modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        nvfp4_modelopt,
        "NVFP4",
    ),
    "FP8, modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, fp8_tensor, "fp8"
    ),
    "bitsandbytes NF4": Format(_bnb("nf4", False), lambda weight: bitsandbytes(weight, "nf4"), "bitsandbytes NF4"),
    "bitsandbytes NF4, nested": Format(
        _bnb("nf4", True), lambda weight: bitsandbytes(weight, "nf4", nested=True), "bitsandbytes NF4"
    ),
    "bitsandbytes FP4": Format(_bnb("fp4", False), lambda weight: bitsandbytes(weight, "fp4"), "bitsandbytes FP4"),
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
