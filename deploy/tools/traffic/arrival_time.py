"""Read the kernel's arrival times of bytes, by the wall clock (SO_TIMESTAMPNS, Linux only)."""

from __future__ import annotations

import math
import socket
import struct
import sys
import time

SO_TIMESTAMPNS = 35  # the option's number on x86 and Arm; the socket module lacks this option
TIMESPEC = struct.Struct("qq")
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size)
UNLIKELY_S = 60.0  # a longer delay is taken as a sign that the wall clock was changed


def ask_for_stamps(sock: socket.socket) -> None:
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def lateness(ancillary: list[tuple[int, int, bytes]]) -> float:
    """Return the seconds since the newest byte arrived; NaN if unknown."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = TIMESPEC.unpack(data)
            late = time.time() - (seconds + nanoseconds * 1e-9)
            return max(0.0, late) if late < UNLIKELY_S else math.nan
    return math.nan
