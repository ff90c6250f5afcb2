"""Tell systemd that a process serves, is alive, and ends. Without systemd nothing is told."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from shared.config.systemd import NotifySocket

LONGEST_WAIT_S = 1.0  # for systemd to take a message
CALL_EVERY_S = 0.5  # for loops that do not turn by themselves


class ServiceManager:
    """The loop that serves calls `tell`, so that systemd restarts a process whose loop hangs.

    Call it at least every third of the watchdog's time. No call raises: without systemd a process serves as well.
    """

    def __init__(self, place: NotifySocket, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._clock = clock
        self._next_sign = clock()
        self._was_ready = self._was_leaving = False
        self._socket: socket.socket | None = None
        if place.address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.settimeout(LONGEST_WAIT_S)

    @property
    def listens(self) -> bool:
        return self._socket is not None

    def tell(self, *, is_leaving: bool) -> None:
        """The first call says that the process serves, and starts the watchdog.

        `is_leaving`: a signal has asked the process to end. systemd does not hear of an operator's drain: it would
        limit the drain's time."""
        if self._socket is None:
            return
        lines = []
        if not self._was_ready:  # the watchdog, too: `close` has stopped it if this program replaces another
            lines += ["READY=1", *([f"WATCHDOG_USEC={self._place.watchdog_us}"] if self._place.watchdog_us else [])]
        if is_leaving and not self._was_leaving:
            lines.append("STOPPING=1")
        if self._place.watchdog_us and self._clock() >= self._next_sign:
            self._next_sign = self._clock() + self._place.watchdog_us / 3e6
            lines.append("WATCHDOG=1")
        self._was_ready, self._was_leaving = True, self._was_leaving or is_leaving
        self._send(lines)

    def close(self) -> None:
        """Stop the watchdog: the loop is over, and a program that replaces this one may load its model for minutes."""
        if self._place.watchdog_us:
            self._send(["WATCHDOG_USEC=0"])
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, lines: list[str]) -> None:
        if lines and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._place.address)
