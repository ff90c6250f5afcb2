"""Which compilers of kernels are there. Everything works without them, slower."""

from __future__ import annotations

import functools
import importlib
import logging


def has_numba() -> bool:
    """For kernels on a CPU. One log line where it is missing or broken."""
    return _can_import("numba", "plain torch kernels, slower")


@functools.cache
def has_triton() -> bool:
    """For kernels on a GPU: torch's CUDA build brings it. One log line where it is missing or broken."""
    return _can_import("triton", "plain torch kernels, much slower")


def _can_import(name: str, instead: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError as error:
        logging.getLogger(__name__).warning("%s can't be used (%s): %s", name, error, instead)
        return False
    return True
