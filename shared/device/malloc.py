"""Makes the C allocator keep large blocks that were freed, for processes that allocate them all the time.

By default glibc maps each block above 128 KiB anew and unmaps it when freed, so that every page frame that arrives
and every activation of a forward pays for the kernel zeroing its memory: measured, a page transfer over ZMQ ran at
half the speed. Knows nothing of who allocates.
"""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MMAP_ABOVE_BYTES = 32 << 20  # the largest that glibc takes
TRIM_ABOVE_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Call once, early, in a node's process. False where the allocator is not glibc's; that only costs speed."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((M_MMAP_THRESHOLD, MMAP_ABOVE_BYTES), (M_TRIM_THRESHOLD, TRIM_ABOVE_BYTES))
    return all([mallopt(name, value) == 1 for name, value in settings])


def give_freed_memory_back() -> None:
    """Return what was freed to the system. Call it after work that is not done again, as loading: it takes the time of
    zeroing that memory once more."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
