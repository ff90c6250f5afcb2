"""The garbage collector's passes, where they would cost too much: they stop the whole process for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """None of them while the body runs; circles that are dropped meanwhile stay until later."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
