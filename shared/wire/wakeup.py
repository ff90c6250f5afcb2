"""A pipe that makes a poll return: workers set it when a closure has finished. Knows nothing of who polls."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """`set` from any thread, any number of times; `clear` by the one who polls `fd`. Never blocks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may call `set` in the middle of one
        self.fd, self._write_fd = os.pipe()
        for fd in (self.fd, self._write_fd):
            os.set_blocking(fd, False)

    def set(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # a full pipe is set already; a closed one has no reader
            os.write(self._write_fd, b"\x01")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        with self._lock:
            write_fd, self._write_fd = self._write_fd, -1  # its number may be another file's soon, and `set` come late
            for fd in (self.fd, write_fd):
                with contextlib.suppress(OSError):
                    os.close(fd)
