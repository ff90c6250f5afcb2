"""Write log records as lines.

Only plain values are written, so lists of token ids and tensors can't slip in.

    text    2026-01-31T12:00:00.123Z INFO    decode-0 peer lost node=prefill-0 silent_s=5.25
    json    {"time":"2026-01-31T12:00:00.123Z","level":"info","part":"decode-0","message":"peer lost",...}
"""

from __future__ import annotations

import enum
import json
import math
import re
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

from shared.config.settings.log_settings import LogConfig

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
JSON = "json"
HEAD = ("time", "level", "part", "message")  # the first keys of a JSON line, which no field may have
MAX_VALUE_CHARS = 300
PLAIN = re.compile(r"[\w.:/@%+#,\[\]<>()*-]+")


def utc_now() -> datetime:
    return datetime.now(UTC)


Heed = Callable[[str, str, dict[str, object]], None]  # gets level, message and fields


def open_log(part: str, settings: LogConfig, heed: Heed | None = None) -> Logger:
    """Return a process's log, on stderr."""
    return Logger(part, sys.stderr, level=settings.log_level, form=settings.log_format, heed=heed)


class Logger:
    """Writes whole lines, so that processes on one pipe never mix their lines. Any thread may use it.

    `form`: "text" or "json". `heed` gets each line too, of all levels."""

    def __init__(
        self,
        node: str,
        stream: TextIO,
        *,
        level: str = "info",
        form: str = "text",
        now: Callable[[], datetime] = utc_now,
        heed: Heed | None = None,
    ) -> None:
        self.node = node
        self._stream = stream
        self._threshold = LEVELS[level]
        self._form = form
        self._now = now
        self._heed = heed

    def debug(self, message: str, /, **fields: object) -> None:
        self.write("debug", message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        self.write("info", message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        self.write("warning", message, fields)

    def error(self, message: str, /, **fields: object) -> None:
        self.write("error", message, fields)

    def enabled(self, level: str) -> bool:
        return LEVELS[level] >= self._threshold

    def write(self, level: str, message: str, fields: dict[str, object]) -> None:
        """Ignore a closed stream, because daemons outlive terminals."""
        if self._heed is not None:
            self._heed(level, message, fields)
        if not self.enabled(level):
            return
        try:
            self._stream.write(self.line(level, message, fields) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return

    def line(self, level: str, message: str, fields: dict[str, object]) -> str:
        time = self._now().strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        if self._form == JSON:
            return json_line((time, level, self.node, message), fields)
        pairs = "".join(f" {key}={shown(value)}" for key, value in fields.items())
        return f"{time} {level.upper():<7} {self.node} {one_line(message)}{pairs}"


def json_line(head: tuple[str, str, str, str], fields: dict[str, object]) -> str:
    """`head`: the values of HEAD. All else than ASCII is escaped, so that a line has one meaning in every encoding."""
    named = dict(zip(HEAD, head, strict=True))
    return json.dumps(named | {key: plain(value) for key, value in fields.items()}, separators=(",", ":"))


def foreign_line(form: str, part: str, line: str) -> str:
    """Return a line that a process wrote past its log, e.g. a library's, for a log that several processes share."""
    return Logger(part, sys.stderr, form=form).line("info", line, {}) if form == JSON else f"{part} | {line}"


def one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def shown(value: object) -> str:
    """Format a value for a line of text."""
    if isinstance(value, BaseException):
        return json.dumps(plain(value))
    text = f"{value:.6g}" if isinstance(value, float) else str(plain(value))
    return text if PLAIN.fullmatch(text) else json.dumps(text)


def plain(value: object) -> str | int | float | bool | None:
    """Return a number, True, False, None, a text of limited length or a whole traceback. Of other values return type
    and length."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, BaseException):
        return "".join(traceback.format_exception(value)).rstrip()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)  # JSON has no infinity
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str) or (isinstance(value, tuple) and hasattr(value, "_fields")):  # or a request's key
        return cut(str(value))
    length = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"<{type(value).__name__}{length}>"


def cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}... ({len(text)} characters)"
