"""Limit the lines about each kind of event, so that no peer can fill the log."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from shared.observe.log import Logger


class LogOnce:
    """Writes a kind's first `lines` events of an interval, and counts its later events for the next line.

    Keeps at most `max_kinds` kinds and drops the kind whose interval began first. Owned by one thread.
    """

    def __init__(
        self,
        log: Logger,
        *,
        lines: int = 1,
        interval_s: float = 60.0,
        max_kinds: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._lines = lines
        self._interval_s = interval_s
        self._max_kinds = max_kinds
        self._clock = clock
        # kind -> (begin of its interval, events since then)
        self._kinds: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def debug(self, message: str, /, **fields: object) -> None:
        """Write the line without a limit: who asks for this level wants each event."""
        self._log.debug(message, **fields)

    def info(self, kind: Hashable, message: str, /, **fields: object) -> bool:
        return self._write("info", kind, message, fields)

    def warning(self, kind: Hashable, message: str, /, **fields: object) -> bool:
        return self._write("warning", kind, message, fields)

    def error(self, kind: Hashable, message: str, /, **fields: object) -> bool:
        return self._write("error", kind, message, fields)

    def _write(self, level: str, kind: Hashable, message: str, fields: dict[str, object]) -> bool:
        now = self._clock()
        began, events = self._kinds.get(kind, (float("-inf"), 0))
        silent = 0
        if now - began < self._interval_s:
            self._kinds[kind] = (began, events + 1)
            if events >= self._lines:
                return False
        else:
            silent = max(0, events - self._lines)
            self._kinds[kind] = (now, 1)
            self._kinds.move_to_end(kind)
            while len(self._kinds) > self._max_kinds:
                self._kinds.popitem(last=False)
        self._log.write(level, message, fields | ({"more_since": silent} if silent else {}))
        return True
