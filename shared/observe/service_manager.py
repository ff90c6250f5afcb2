"""Tell systemd that a process serves, is alive, and ends. Without systemd nothing is told."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from shared.config.machine.systemd import NotifySocket

LONGEST_WAIT_S = 1.0  # for systemd to take the last message
CALL_EVERY_S = 0.5  # for loops that do not turn by themselves


class ServiceManager:
    """The loop that serves calls `tell`, so that systemd restarts a process whose loop hangs.

    Call it at least every third of the watchdog's time. No call raises: without systemd a process serves as well.
    `tell` never waits. What a full queue refuses, the next call says again.
    """

    def __init__(self, place: NotifySocket, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._clock = clock
        self._next_sign = clock()
        self._was_ready = self._was_leaving = False
        self._socket: socket.socket | None = None
        if place.address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    @property
    def listens(self) -> bool:
        return self._socket is not None

    def tell(self, *, is_leaving: bool) -> None:
        """The first call says that the process serves, and starts the watchdog.

        `is_leaving`: a signal has asked the process to end. systemd does not hear of an operator's drain: it would
        limit the drain's time."""
        if self._socket is None:
            return
        lines, now = [], self._clock()
        is_sign = self._place.watchdog_us > 0 and now >= self._next_sign
        if not self._was_ready:  # the watchdog, too: `close` has stopped it if this program replaces another
            lines += ["READY=1", *([f"WATCHDOG_USEC={self._place.watchdog_us}"] if self._place.watchdog_us else [])]
        if is_leaving and not self._was_leaving:
            lines.append("STOPPING=1")
        if is_sign:
            lines.append("WATCHDOG=1")
        if lines and self._send(lines):
            self._was_ready, self._was_leaving = True, self._was_leaving or is_leaving
            if is_sign:
                self._next_sign = now + self._place.watchdog_us / 3e6

    def close(self) -> None:
        """Stop the watchdog: the loop is over, and a program that replaces this one may load its model for minutes."""
        if self._socket is None:
            return
        self._socket.settimeout(LONGEST_WAIT_S)
        if self._place.watchdog_us:
            self._send(["WATCHDOG_USEC=0"])
        self._socket.close()
        self._socket = None

    def _send(self, lines: list[str]) -> bool:
        assert self._socket is not None
        try:
            self._socket.sendto("\n".join(lines).encode(), self._place.address)
        except OSError:
            return False
        return True
