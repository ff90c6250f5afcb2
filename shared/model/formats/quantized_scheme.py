"""Read `quantization_config` of a config.json: how a folder's weights are stored. Loads no torch.

Inputs of products are never rounded, so what a scheme says of activations is not used. Programs that quantize also note
how they did it; a reader needs no such field. All fields that change what the tensors mean are used or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config.models.json_file import read_json_if_there
from shared.core.errors import ConfigError

Raw = Mapping[str, Any]
PACKED_BITS = (2, 4, 8)  # widths that divide a word of 32 bits
COMPRESSED_FORMATS = (
    "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "nvfp4-pack-quantized",
)  # fmt: skip
MX_GROUP, NV_GROUP = 32, 16
MODELOPT_FILE = "hf_quant_config.json"  # holds the scheme in folders whose config.json does not


@dataclass(frozen=True, slots=True)
class Scheme:
    method: str
    name: str  # for people
    bits: tuple[int, ...] = ()  # widths of whole numbers in 32-bit words
    block: tuple[int, int] | None = None  # rows and columns for each scale, where these need not divide the matrix
    zeros_less_one: bool = False  # the file has each zero point minus 1 (the first version of GPTQ's format)


def scheme_of(config: Raw, folder: Path) -> Scheme | None:
    """Return how the weights of a config.json are stored, or None if they are plain. Raises ConfigError."""
    try:
        part = config.get("text_config") or {}  # Kimi K2.5 says it there
        raw = config.get("quantization_config") or part.get("quantization_config") or _own_file(folder)
        if not raw:
            return None
        method = str(raw.get("quant_method"))
        if method not in READERS:
            raise _Unsupported(f"quant_method {method!r} is not supported, only {', '.join(READERS)}")
        return READERS[method](raw)
    except _Unsupported as reason:
        raise ConfigError(f"{folder}: quantization_config: {reason}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}: quantization_config has a missing or wrong field: {error}") from error


def _own_file(folder: Path) -> Raw | None:
    """NVIDIA's older folders have the scheme in a file of its own."""
    raw = read_json_if_there(folder / MODELOPT_FILE)
    return {"quant_method": "modelopt", **raw} if raw else None


class _Unsupported(Exception):
    """Something of the scheme is not read; the message says what."""


def _need(raw: Raw, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
    value = raw.get(name)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    if value not in allowed:
        raise _Unsupported(f"{name} {raw.get(name)!r} is not supported, only {', '.join(map(str, allowed))}")
    return value


def _refuse_fields(raw: Raw, *names: str) -> None:
    for name in names:
        if raw.get(name):
            raise _Unsupported(f"{name} {raw[name]!r} is not supported"[:200])


def _fp8(raw: Raw) -> Scheme:
    _need(raw, "fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    _need(raw, "expert_dtype", ["fp8"], "fp8")
    block = _block(raw.get("weight_block_size"))
    return Scheme("fp8", "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}", block=block)


def _block(value: Any) -> tuple[int, int] | None:
    if not value:
        return None
    rows, columns = (int(size) for size in (value.split("x") if isinstance(value, str) else value))
    if min(rows, columns) < 1:
        raise ValueError(f"a block of {rows} x {columns}")
    return rows, columns


def _awq(raw: Raw) -> Scheme:
    _need(raw, "w_bit" if "w_bit" in raw else "bits", [4])
    _need(raw, "version", ["gemm"], "gemm")
    _need(raw, "zero_point", [True], True)
    if raw.get("backend") == "llm-awq":  # packs in another order
        _refuse_fields(raw, "backend")
    return Scheme("awq", "AWQ 4 bits", bits=(4,))


def _gptq(raw: Raw) -> Scheme:
    bits = _need(raw, "bits", PACKED_BITS)
    version = _need(raw, "checkpoint_format" if raw.get("checkpoint_format") else "format", ["gptq", "gptq_v2"], "gptq")
    _refuse_fields(raw, "is_marlin_format", "rotation", "adapter")
    if any(not str(pattern).startswith("-:") for pattern in raw.get("dynamic") or ()):  # "-:" leaves modules plain
        _refuse_fields(raw, "dynamic")
    order = ", act order" if raw.get("desc_act") else ""
    return Scheme("gptq", f"GPTQ {bits} bits{order}", bits=(bits,), zeros_less_one=version == "gptq")


def _compressed(raw: Raw) -> Scheme:
    _refuse_fields(raw, "transform_config")
    _need(raw.get("sparsity_config") or {}, "format", ["dense"], "dense")
    groups = [_compressed_group(group, raw) for group in raw["config_groups"].values() if _weights_of(group)]
    blocks = {block for _, _, block in groups if block is not None}
    if len(blocks) > 1:
        raise _Unsupported(f"config_groups with blocks of {len(blocks)} sizes are not supported")
    names = " and ".join(dict.fromkeys(name for name, _, _ in groups))
    bits = tuple(dict.fromkeys(bits for _, bits, _ in groups))
    return Scheme("compressed-tensors", f"compressed-tensors {names}", bits, next(iter(blocks), None))


def _weights_of(group: Any) -> Raw | None:
    if not isinstance(group, Mapping):  # the name of a preset with its targets
        raise _Unsupported(f"config_groups of {group!r} are not supported, only written-out ones")
    weights: Raw | None = group.get("weights")
    return weights


def _compressed_group(group: Raw, raw: Raw) -> tuple[str, int, tuple[int, int] | None]:
    """Return a group's name, bits and block."""
    weights = group["weights"]
    stored = _need(group if group.get("format") else raw, "format", COMPRESSED_FORMATS)
    kind, bits = _need(weights, "type", ["int", "float"], "int"), int(weights.get("num_bits", 8))
    is_nvfp4 = stored == "nvfp4-pack-quantized"
    strategies = ["tensor_group"] if is_nvfp4 else ["tensor", "channel", "group", "block"]
    strategy = _need(weights, "strategy", strategies, "tensor")
    _refuse_fields(weights, "dynamic")
    if kind == "int":
        _need(weights, "num_bits", PACKED_BITS if stored == "pack-quantized" else range(2, 9), 8)
    elif bits != 4 or stored not in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        _need(weights, "num_bits", [8], 8)
    if stored.startswith("mx"):
        _need(weights, "group_size", [MX_GROUP])
    if is_nvfp4:
        _need(weights, "group_size", [NV_GROUP])
    inputs = (group.get("input_activations") or {}).get("num_bits", 16)
    return f"W{bits}A{inputs} ({kind}, {strategy})", bits, _block(weights.get("block_structure"))


def _modelopt(raw: Raw) -> Scheme:
    """NVIDIA's: "quantization" has the fields where the scheme comes from a file of its own."""
    raw = raw.get("quantization") or raw
    algorithm = _need(raw, "quant_algo", ["fp8", "nvfp4"])
    if algorithm == "nvfp4":
        _need(raw, "group_size", [NV_GROUP], NV_GROUP)
    return Scheme("modelopt", "fp8" if algorithm == "fp8" else "NVFP4")


def _bitsandbytes(raw: Raw) -> Scheme:
    """The file says of each matrix whether its 4 bits are NF4 or FP4, and whether its scales are bytes."""
    if not (raw.get("load_in_4bit") or raw.get("_load_in_4bit")):
        raise _Unsupported("only load_in_4bit of bitsandbytes is supported")
    kind = _need(raw, "bnb_4bit_quant_type", ["fp4", "nf4"], "fp4")
    _need(raw, "bnb_4bit_quant_storage", ["uint8"], "uint8")
    return Scheme("bitsandbytes", f"bitsandbytes {kind.upper()}")


READERS: Mapping[str, Callable[[Raw], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": lambda raw: Scheme("mxfp4", "MXFP4"),
}
