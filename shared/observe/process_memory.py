"""Measure the memory of this process."""

from __future__ import annotations

import os

STATM, STATM_BYTES = "/proc/self/statm", 256


class ProcessMemory:
    """Measures this process's private memory in bytes, without files and shared KV pools.

    Its descriptor stays open, so it works while no other descriptor is free.
    """

    def __init__(self) -> None:
        self._statm = os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def __call__(self) -> int:
        _, resident, shared, *_ = os.pread(self._statm, STATM_BYTES, 0).split()
        return (int(resident) - int(shared)) * self._page_bytes

    def close(self) -> None:
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1
