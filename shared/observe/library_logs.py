"""Write log records of libraries (uvicorn, transformers) as lines of our own log."""

from __future__ import annotations

import logging

from shared.observe.log import Logger
from shared.observe.log_once import LogOnce


class StdlibHandler(logging.Handler):
    """Writes every error, and what our own code tells while it starts. Clients can provoke warnings, so each text is
    written once per interval, with a count.

    `handle` holds the handler's lock, so any thread may log.
    """

    def __init__(self, log: Logger) -> None:
        super().__init__(level=logging.INFO)
        self._log = log
        self._once = LogOnce(log)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        fields: dict[str, object] = {"logger": record.name} | ({"error": error} if error else {})
        if record.levelno >= logging.ERROR:
            self._log.write("error", record.getMessage(), fields)
        elif record.levelno < logging.WARNING:
            self._log.write("info", record.getMessage(), fields)
        else:
            text = record.getMessage()
            kind = text if record.msg == "%s" else str(record.msg)  # all of Python's own warnings have the message "%s"
            self._once.warning((record.name, kind), text, **fields)


def capture_libraries(log: Logger) -> None:
    """Route warnings and errors of libraries and Python to our log. Each app calls it once.

    Our own models, kernels and engines load in tools too, and have no node's log: their info lines come as well."""
    root = logging.getLogger()
    root.handlers[:] = [StdlibHandler(log)]
    logging.getLogger("shared").setLevel(logging.INFO)
    logging.captureWarnings(True)
