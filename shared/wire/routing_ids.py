"""Draws the routing id of a ROUTER's first connection.

libzmq 4.3.5 gives a ROUTER's connections rising ids, and draws the first one with C's unseeded `rand`. This
module knows nothing of sockets.
"""

from __future__ import annotations

import ctypes
import secrets

MOST_FIRST = 0xEFFF_FFFF  # 268 million connections before the 32 bits begin again at zero


def draw_first_id() -> None:
    """Seed C's `rand`, so that peers can't guess the next ROUTER's ids. Call this before each ROUTER is made.

    Where C's functions can't be reached, nothing changes.
    """
    try:
        libc = ctypes.CDLL(None)
        srand, rand = libc.srand, libc.rand
    except (OSError, TypeError, AttributeError):
        return
    for _ in range(64):  # each seed fits with a probability of 15/16
        seed = secrets.randbits(32)
        srand(seed)
        if first_id(rand(), rand()) <= MOST_FIRST:
            srand(seed)
            return


def first_id(low: int, high: int) -> int:
    """Return what libzmq makes of two values of `rand`."""
    return (low | high << 31) & 0xFFFF_FFFF
