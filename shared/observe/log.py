"""Write log records as lines.

Only plain values are written, so lists of token ids and tensors can't slip in.

    2026-01-31T12:00:00.123Z INFO  decode-0 peer lost node=prefill-0 silent_s=5.2
"""

from __future__ import annotations

import enum
import json
import re
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
COLORS = {"debug": "2", "info": "32", "warning": "33", "error": "31"}
MAX_VALUE_CHARS = 300
PLAIN = re.compile(r"[\w.:/@%+#,\[\]<>()*-]+")


def utc_now() -> datetime:
    return datetime.now(UTC)


class Logger:
    """Writes whole lines, so that processes on one pipe never mix their lines. Any thread may use it."""

    def __init__(
        self,
        node: str,
        stream: TextIO,
        *,
        level: str = "info",
        color: bool = False,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.node = node
        self._stream = stream
        self._threshold = LEVELS[level]
        self._color = color
        self._now = now

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
        if not self.enabled(level):
            return
        try:
            self._stream.write(self.line(level, message, fields) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return

    def line(self, level: str, message: str, fields: dict[str, object]) -> str:
        time = self._now().strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        head = f"{level.upper():<7}"
        if self._color:
            head = f"\x1b[{COLORS[level]}m{head}\x1b[0m"
        pairs = "".join(f" {key}={shown(value)}" for key, value in fields.items())
        return f"{time} {head} {self.node} {one_line(message)}{pairs}"


def one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def shown(value: object) -> str:
    """Format a plain value or a traceback. For other values write type and length."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, BaseException):
        return json.dumps("".join(traceback.format_exception(value)).rstrip())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) or value is None or isinstance(value, int):
        return quoted(str(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return quoted(str(value))  # a request's key
    length = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return quoted(f"<{type(value).__name__}{length}>")


def quoted(text: str) -> str:
    if len(text) > MAX_VALUE_CHARS:
        text = f"{text[:MAX_VALUE_CHARS]}... ({len(text)} characters)"
    return text if PLAIN.fullmatch(text) else json.dumps(text)
