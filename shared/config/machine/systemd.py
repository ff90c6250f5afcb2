"""Read what systemd tells a service by its environment, as in sd_notify(3) and sd_watchdog_enabled(3)."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotifySocket:
    """The datagram socket on which systemd hears of a service.

    - address: a path, or a name after a zero byte (Linux's abstract sockets); empty without systemd.
    - watchdog_us: systemd kills a service after this time of silence, in microseconds; 0 for never.
    """

    address: str = ""
    watchdog_us: int = 0


def notify_socket() -> NotifySocket:
    """The variables stay set, because a node that restarts replaces its program and needs them again."""
    address = os.environ.get("NOTIFY_SOCKET", "")  # noqa: TID251
    if not address.startswith(("/", "@")):  # none, or a kind that only virtual machines have
        return NotifySocket()
    silence = os.environ.get("WATCHDOG_USEC", "0")  # noqa: TID251
    watched = os.environ.get("WATCHDOG_PID", "")  # noqa: TID251
    is_watched = silence.isdecimal() and watched in ("", str(os.getpid()))
    return NotifySocket(address.replace("@", "\0", 1), int(silence) if is_watched else 0)
