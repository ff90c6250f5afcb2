"""Keep a log's newest warnings and errors, for people who look at a router's status."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime

from shared.observe.log import plain, utc_now

MOST = 30
SERIOUS = ("warning", "error")


class LastFaults:
    """Any thread may add, since a deque's operations are atomic."""

    def __init__(self, now: Callable[[], datetime] = utc_now) -> None:
        self._now = now
        self._kept: deque[dict[str, object]] = deque(maxlen=MOST)

    def heed(self, level: str, message: str, fields: Mapping[str, object]) -> None:
        """Take a log line. Of an exception only the kind is kept: its text may be long."""
        if level in SERIOUS:
            shown = {name: short(value) for name, value in fields.items()}
            time = self._now().isoformat(timespec="milliseconds")
            self._kept.append({"time": time, "level": level, "message": message, "fields": shown})

    def newest_first(self) -> list[dict[str, object]]:
        return list(reversed(self._kept.copy()))


def short(value: object) -> object:
    return type(value).__name__ if isinstance(value, BaseException) else plain(value)
