"""A pipe that makes a poll return, for example after a step."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """Any thread may call `set`; only the thread that polls `fd` calls `clear`. Neither method blocks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may call `set` inside `set`
        self.fd, self._write_fd = os.pipe()
        for fd in (self.fd, self._write_fd):
            os.set_blocking(fd, False)

    def set(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # if full, the pipe wakes the poll; if closed, it has no reader
            os.write(self._write_fd, b"\x01")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        with self._lock:
            write_fd, self._write_fd = self._write_fd, -1  # a late `set` must not write to a reused descriptor
            for fd in (self.fd, write_fd):
                with contextlib.suppress(OSError):
                    os.close(fd)
