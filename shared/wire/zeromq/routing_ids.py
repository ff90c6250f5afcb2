"""Makes a ROUTER's routing ids random. libzmq 4.3.5 counts from a value of C's `rand`, which it doesn't seed."""

from __future__ import annotations

import ctypes
import secrets

MOST_FIRST = 0xEFFF_FFFF  # at least 268 million ids follow before an overflow


def draw_first_id() -> None:
    """Seed C's `rand`. Call this before each ROUTER is made."""
    try:
        libc = ctypes.CDLL(None)
        srand, rand = libc.srand, libc.rand
    except (OSError, TypeError, AttributeError):
        return
    for _ in range(64):
        seed = secrets.randbits(32)
        srand(seed)
        if first_id(rand(), rand()) <= MOST_FIRST:
            srand(seed)
            return


def first_id(low: int, high: int) -> int:
    return (low | high << 31) & 0xFFFF_FFFF
