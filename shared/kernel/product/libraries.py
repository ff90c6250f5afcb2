"""Tells which kernels the processor and the packages of this machine can run.

numba is imported where a CPU computes: a GPU's node does without it.
"""

from __future__ import annotations

import functools
import importlib
import logging

import torch


@functools.cache
def has_amx() -> bool:
    """Return whether compiled kernels multiply bytes with AMX here."""
    from shared.kernel.code.jit import processor_features
    from shared.kernel.product import amx

    return amx.has_amx(processor_features())


@functools.cache
def multiplies_bytes_best() -> bool:
    """Return whether this processor has VNNI, but neither BF16 nor AMX: there int8 weights are faster than blocks."""
    from shared.kernel.code.jit import processor_features

    features = processor_features()
    return bool(features.get("avx512vnni")) and not features.get("avx512bf16") and not has_amx()


def has_fused_products() -> bool:
    """Return whether compiled kernels multiply here: the processor must fuse a product and a sum.

    Elsewhere plain torch multiplies, whose order of sums depends on its version and the processor."""
    from shared.kernel.product import product

    return product.supports(2, torch.float32)


@functools.cache
def has_triton() -> bool:
    """Return whether triton can be imported."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        logging.getLogger(__name__).warning("triton can't be used (%s): plain torch kernels, much slower", error)
        return False
    return True


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run on this device. Tests also allow a CPU and the virtual GPU."""
    return device.type == "cuda" and has_triton()
