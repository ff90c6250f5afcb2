"""Keeps a thread's newest result back until the thread computes a model without the GIL.

A result wakes threads that need the GIL. While the thread prepares its next step, they would delay this step.

    forward         | compute 1 | prepare 2 | compute 2 . . . . . . . . | prepare 3 | compute 3
    result 1                   held         ^ released
    other threads                           process result 1, plan 3
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Held(threading.local):
    give: Callable[[], None] | None = None


_held = _Held()


def hold(give: Callable[[], None]) -> None:
    """Call `give` at this thread's next `release`. Give the result held before at once."""
    before, _held.give = _held.give, give
    if before is not None:
        before()


def release() -> None:
    """Give the held result, if any. Call this just before the GIL is released for long."""
    give, _held.give = _held.give, None
    if give is not None:
        give()
