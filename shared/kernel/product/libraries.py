"""Detects the optional kernel compilers, and logs a missing one."""

from __future__ import annotations

import functools
import importlib
import logging

import torch


@functools.cache
def has_numba() -> bool:
    return _can_import("numba", "plain torch kernels, slower")


@functools.cache
def has_amx() -> bool:
    """Return whether compiled kernels multiply bytes with AMX here."""
    if not has_numba():
        return False
    from shared.kernel.code.jit import processor_features
    from shared.kernel.product import amx

    return amx.has_amx(processor_features())


@functools.cache
def multiplies_bytes_best() -> bool:
    """Return whether this processor has VNNI, but neither BF16 nor AMX: there int8 weights are faster than blocks."""
    if not has_numba():
        return False
    from shared.kernel.code.jit import processor_features

    features = processor_features()
    return bool(features.get("avx512vnni")) and not features.get("avx512bf16") and not has_amx()


def has_fused_products() -> bool:
    """Return whether compiled kernels multiply here: numba is there, and the processor fuses a product and a sum.

    Elsewhere plain torch multiplies, whose order of sums depends on its version and the processor."""
    if not has_numba():
        return False
    from shared.kernel.product import product

    return product.supports(2, torch.float32)


@functools.cache
def has_triton() -> bool:
    """Return whether triton can be imported."""
    return _can_import("triton", "plain torch kernels, much slower")


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run on this device. Tests also allow a CPU and the virtual GPU."""
    return device.type == "cuda" and has_triton()


def _can_import(name: str, instead: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError as error:
        logging.getLogger(__name__).warning("%s can't be used (%s): %s", name, error, instead)
        return False
    return True
