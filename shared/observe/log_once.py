"""Log each kind of event once per interval, so that no peer can fill the log."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from shared.observe.log import Logger


class LogOnce:
    """Writes a kind's first event, and counts the interval's later events for the next line.

    Keeps at most `max_kinds` kinds and drops the kind that was written longest ago. Owned by one thread.
    """

    def __init__(
        self,
        log: Logger,
        *,
        interval_s: float = 60.0,
        max_kinds: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._max_kinds = max_kinds
        self._clock = clock
        # kind -> (time of its last line, events since then)
        self._kinds: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def info(self, kind: Hashable, message: str, /, **fields: object) -> bool:
        return self._write("info", kind, message, fields)

    def warning(self, kind: Hashable, message: str, /, **fields: object) -> bool:
        return self._write("warning", kind, message, fields)

    def error(self, kind: Hashable, message: str, /, **fields: object) -> bool:
        return self._write("error", kind, message, fields)

    def _write(self, level: str, kind: Hashable, message: str, fields: dict[str, object]) -> bool:
        now = self._clock()
        last, silent = self._kinds.get(kind, (float("-inf"), 0))
        if now - last < self._interval_s:
            self._kinds[kind] = (last, silent + 1)
            return False
        self._kinds[kind] = (now, 0)
        self._kinds.move_to_end(kind)
        while len(self._kinds) > self._max_kinds:
            self._kinds.popitem(last=False)
        self._log.write(level, message, fields | ({"more_since": silent} if silent else {}))
        return True
