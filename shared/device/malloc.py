"""Set up glibc's allocator, and return freed memory to the system.

By default glibc maps new memory for each allocation above 128 KiB, and the kernel zeroes this memory. Every arriving KV
page and every activation would pay for this: page transfers over ZMQ ran at half the speed. So nodes keep large freed
blocks.

By default glibc also has several heaps, but `malloc_trim` returns only the free end of the main heap. Each thread could
keep 64 MiB after a flood of requests. So all threads share the main heap.
"""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
MMAP_ABOVE_BYTES = 32 << 20  # glibc's maximum
TRIM_ABOVE_BYTES = 512 << 20


def share_one_heap() -> bool:
    """Make all threads allocate from one heap. Call once, before other threads start.

    Return False if the allocator is not glibc's. Freed memory may then stay with the process.
    """
    return _set((M_ARENA_MAX, 1))


def keep_freed_memory() -> bool:
    """Share one heap that keeps large freed blocks. `share_one_heap` says when to call this, and the result."""
    return _set((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, MMAP_ABOVE_BYTES), (M_TRIM_THRESHOLD, TRIM_ABOVE_BYTES))


def _set(*settings: tuple[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(name, value) == 1 for name, value in settings])


def give_freed_memory_back() -> None:
    """Return freed memory to the system after one-time work such as loading."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
