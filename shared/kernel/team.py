"""Runs a compiled function on several cores with torch's own OpenMP threads. Knows nothing of what it computes.

numba's threading layers bring a second pool of threads beside torch's; two pools that spin for each other's cores
make a step many times slower. So we enter torch's OpenMP runtime itself: one pool, and waking it takes a microsecond.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import torch

EntryFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Team:
    """`size` threads: the caller's and size - 1 of torch's pool, which each caller has one of. Keeps nothing: several
    threads may enter at once, and are as many teams."""

    def __init__(self, size: int) -> None:
        self._enter = _openmp_entry() if size > 1 else None
        self.size = size if self._enter else 1

    def enter(self, function: int, arguments: int) -> None:
        """Every thread calls the C function at an address once, at the same time, with the address of its arguments.
        Returns when all are through; the GIL is left meanwhile."""
        if self._enter is None:
            EntryFunction(function)(arguments)
        else:
            self._enter(function, arguments, self.size, 0)


def _openmp_entry() -> Callable[..., None] | None:
    """GOMP_parallel(function, arguments, threads, flags) of the libgomp that torch has loaded."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            entry = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        entry.restype = None
        return entry
    logging.getLogger(__name__).warning("torch's OpenMP runtime was not found: our own kernels use one thread")
    return None
