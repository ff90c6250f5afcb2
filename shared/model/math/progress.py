"""Log how much of a long work is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
SAID_EVERY_S = 3.0


def with_progress(
    items: Iterable[T], log: logging.Logger, work: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[T]:
    """Yield the items. Every SAID_EVERY_S, log the share of them that is done."""
    every, said = list(items), clock()
    for number, item in enumerate(every):
        if clock() - said >= SAID_EVERY_S:
            said = clock()
            log.info("%s: %d %%", work, 100 * number // len(every))
        yield item
