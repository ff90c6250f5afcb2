"""Records of libraries that use the standard logging (uvicorn, transformers), as our lines."""

from __future__ import annotations

import logging

from shared.observe.log import Logger
from shared.observe.log_once import LogOnce


class StdlibHandler(logging.Handler):
    """An error is written each time. A warning that a client can provoke is not: one line for each text and interval,
    with the count of the others. `handle` holds the handler's lock, so any thread may log."""

    def __init__(self, log: Logger) -> None:
        super().__init__(level=logging.WARNING)
        self._log = log
        self._once = LogOnce(log)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        fields: dict[str, object] = {"logger": record.name} | ({"error": error} if error else {})
        if record.levelno >= logging.ERROR:
            self._log.write("error", record.getMessage(), fields)
        else:
            text = record.getMessage()
            kind = text if record.msg == "%s" else str(record.msg)  # Python's own warnings are all of one form
            self._once.warning((record.name, kind), text, **fields)


def capture_libraries(log: Logger) -> None:
    """Called once by an app: warnings and errors of libraries come as our lines, Python's own warnings too."""
    root = logging.getLogger()
    root.handlers[:] = [StdlibHandler(log)]
    logging.captureWarnings(True)
