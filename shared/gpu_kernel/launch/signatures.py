"""Describe everything that a kernel's machine code depends on: argument types and values that Triton compiles in.

In each kernel module, `real_signatures` calls the launching functions with tensors on the "meta" device, in the sizes
of `real_models.REAL_MODELS`. The launcher records the signatures, which are compiled ahead of time.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from triton._utils import canonicalize_ptr_dtype

ALIGNMENT = 16  # Triton compiles separate code for addresses (in bytes) and integers that are multiples of this
INT32 = range(-(2**31), 2**31)


REAL_DTYPES = (torch.bfloat16, torch.float16)
REAL_BATCH = 256
REAL_CONTEXT = 131072


@dataclass(frozen=True, slots=True)
class Signature:
    """One specialisation of a kernel. On one chip, equal signatures have the same machine code."""

    kernel: str  # "module:function"
    types: tuple[tuple[str, str], ...]  # (parameter, Triton's name of its type or "constexpr"), in order
    constants: tuple[tuple[str, object], ...]  # parameters compiled in: tl.constexpr, None or 1
    aligned: tuple[str, ...]  # parameters whose values are multiples of 16
    num_warps: int
    num_stages: int
    # limit of registers per thread, for compiling ahead of time
    max_registers: int | None = field(default=None, repr=False)

    def find_kernel(self) -> Any:
        module, name = self.kernel.split(":")
        return getattr(importlib.import_module(module), name)

    def describe(self) -> str:
        types = (f"{name}:{kind}" for name, kind in self.types if kind != "constexpr")
        constants = (f"{name}={value}" for name, value in self.constants)
        registers = "" if self.max_registers is None else f", at most {self.max_registers} registers"
        return f"{self.kernel} ({', '.join(types)}; {', '.join(constants)}; {self.num_warps} warps{registers})"


def kernel_name(kernel: Any) -> str:
    return f"{kernel.fn.__module__}:{kernel.fn.__name__}"


def signature_of(
    kernel: Any,
    args: Sequence[object],
    constants: dict[str, object],
    num_warps: int,
    num_stages: int,
    max_registers: int | None = None,
) -> Signature:
    unspecialised = unspecialised_of(kernel)
    types, compiled_in, aligned = [], dict(constants), []
    for place, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        is_free = not ({place, name} & unspecialised)
        if value is None or (is_free and type(value) is int and value == 1):
            compiled_in[name] = value
            types.append((name, "constexpr"))
            continue
        types.append((name, type_name(value)))
        if is_free and is_aligned(value):
            aligned.append(name)
    types += [(name, "constexpr") for name in kernel.arg_names[len(args) :]]
    ordered = tuple((name, compiled_in[name]) for name in kernel.arg_names if name in compiled_in)
    return Signature(kernel_name(kernel), tuple(types), ordered, tuple(aligned), num_warps, num_stages, max_registers)


def unspecialised_of(kernel: Any) -> set[int | str]:
    listed = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get("do_not_specialize")
    return set(listed or ())


def type_name(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(canonicalize_ptr_dtype(value.dtype, False))
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if value in INT32 else "i64" if value < 2**63 else "u64"
    raise TypeError(f"a kernel takes tensors and numbers, not {type(value).__name__}")


def is_aligned(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % ALIGNMENT == 0
    return type(value) is int and value % ALIGNMENT == 0
