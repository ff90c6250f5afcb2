"""When bytes reached this machine, by the kernel's own clock: however late they are read, it is known how late.

Linux stamps every packet on sockets that ask for it (SO_TIMESTAMPNS, wall clock). Elsewhere nothing is known.
"""

from __future__ import annotations

import math
import socket
import struct
import sys
import time

SO_TIMESTAMPNS = 35  # the same on all Linux machines that matter here; the socket module does not name it
TIMESPEC = struct.Struct("qq")
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size)
UNLIKELY_S = 60.0  # the wall clock was set meanwhile


def ask_for_stamps(sock: socket.socket) -> None:
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def lateness(ancillary: list[tuple[int, int, bytes]]) -> float:
    """Seconds since the newest byte just read arrived; NaN where the system does not say."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = TIMESPEC.unpack(data)
            late = time.time() - (seconds + nanoseconds * 1e-9)
            return max(0.0, late) if late < UNLIKELY_S else math.nan
    return math.nan
