"""Run full garbage collections only while they are short, because each one stops all streams.

A full collection visits every object: 10,000 open streams have two million, which takes half a second. Python starts
one whenever the number of objects has grown by a quarter. Here Python collects only young objects, and this module runs
the full collections. Reference counts free answers and connections; only rare paths leave garbage.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable

from shared.observe.process_memory import ProcessMemory

LOOK_S = 5.0
LOOKS_BETWEEN = 12  # calls of is_due() between two short collections
MOST_LOOKS = 720  # after this number of calls of is_due() (an hour), even a long collection runs
FEW_OPEN = 100  # with this number of open requests or more, a collection may be long
SHORT_S = 0.01  # streams hardly notice a stop of this length
MUCH_GARBAGE = 10_000  # freeing this number of objects takes longer than the rest of a collection
GROWTH = 2.0  # if memory minus open streams' share has grown by this factor, garbage may be the reason
STREAM_BYTES = 64 << 10  # assumed memory of an open stream, which needs less, not counting its prompt
NEVER = (1 << 31) - 1  # Python awaits this number of younger collections before a full one


class FullCollections:
    """Decides when a full collection runs."""

    def __init__(self) -> None:
        self._memory = math.inf  # the process's fewest bytes since the last collection
        self._looks = 0  # calls of is_due() since the last collection
        self._took_s = 0.0  # seconds that the last collection took

    def is_due(self, num_open: int, memory: int) -> bool:
        """Call this every LOOK_S. `memory`: the process's bytes now."""
        self._looks += 1
        self._memory = min(self._memory, memory)
        is_short = num_open < FEW_OPEN and self._took_s < SHORT_S
        if self._looks >= (LOOKS_BETWEEN if is_short or not num_open else MOST_LOOKS):
            return True
        return memory - num_open * STREAM_BYTES >= GROWTH * self._memory

    def ran(self, memory: int, took_s: float, num_freed: int) -> None:
        """Record a collection. `memory`: the process's bytes afterwards."""
        self._memory, self._looks = memory, 0
        self._took_s = took_s if num_freed < MUCH_GARBAGE else 0.0


async def run_full_collections(
    num_open: Callable[[], int],
    collect: Callable[[], int] = gc.collect,
    look_s: float = LOOK_S,
) -> None:
    """Run until cancelled. `num_open` returns the number of open requests.

    End at once where Python collects old objects little by little (3.14), because no collection is long there.
    """
    before, memory, collections = gc.get_threshold(), ProcessMemory(), FullCollections()
    gc.set_threshold(*before[:2], NEVER)
    try:
        while gc.get_threshold()[2] == NEVER:
            await asyncio.sleep(look_s)
            if collections.is_due(num_open(), memory()):
                start = time.monotonic()
                num_freed = collect()
                collections.ran(memory(), time.monotonic() - start, num_freed)
    finally:
        gc.set_threshold(*before)
        memory.close()
