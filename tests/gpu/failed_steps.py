"""A step that fails is run again, so streams may be right all the same: checks listen to what the engine logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def no_failed_steps() -> Iterator[None]:
    """AssertionError in the end where anything of the engine was logged as an error."""
    errors, logger = Errors(), logging.getLogger("shared")
    logger.addHandler(errors)
    try:
        yield
    finally:
        logger.removeHandler(errors)
    assert not errors.said, "\n".join(errors.said)
