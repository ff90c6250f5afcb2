"""Return freed memory to the system after a burst of work.

When bodies, connections and answers end, glibc keeps their memory.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from shared.device.malloc import give_freed_memory_back
from shared.observe.process_memory import ProcessMemory

LOOK_S = 5.0
LOOKS_BETWEEN = 6  # fewest checks between two returns, because a return stops all threads for up to 50 ms
CALM_BYTES = 1 << 20  # growth of this size between two checks defers a return
WORTH_BYTES = 4 << 20


class Surplus:
    """Asks for a return if the process's memory does not grow, and is WORTH_BYTES above its minimum so far.

    Memory that is in use during a return may be freed later, so returns are repeated."""

    def __init__(self) -> None:
        self._least = self._before = math.inf
        self._looks = 0  # checks since the last return

    def is_worth_returning(self, memory: int) -> bool:
        """Call this method every LOOK_S. `memory`: the process's bytes now."""
        is_calm = memory - self._before < CALM_BYTES
        self._before, self._least, self._looks = memory, min(self._least, memory), self._looks + 1
        return is_calm and self._looks >= LOOKS_BETWEEN and memory - self._least >= WORTH_BYTES

    def returned(self, memory: int) -> None:
        """`memory`: the process's bytes after a return."""
        self._before, self._looks = memory, 0


async def return_freed_memory(
    give_back: Callable[[], None] = give_freed_memory_back,
    look_s: float = LOOK_S,
) -> None:
    """Run until cancelled. `give_back` runs on a thread."""
    surplus, memory = Surplus(), ProcessMemory()
    try:
        while True:
            await asyncio.sleep(look_s)
            if surplus.is_worth_returning(memory()):
                await asyncio.to_thread(give_back)
                surplus.returned(memory())
    finally:
        memory.close()
