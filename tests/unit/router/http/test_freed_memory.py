"""A router returns the memory that a burst took once the burst is over, and leaves memory in use alone."""

from __future__ import annotations

import asyncio
import io
import mmap

from router.app import RouterKeys, start_background
from router.http.freed_memory import CALM_BYTES, LOOKS_BETWEEN, WORTH_BYTES, Surplus, return_freed_memory
from router.tenants.book import Tenants
from shared.config.processes import RouterProcessConfig
from shared.observe.log import Logger
from tests.support.machine.patience import HANG_GUARD_S

REST = 60 << 20
BURST = REST + WORTH_BYTES


def returns(*memory: int, left: int = REST) -> list[bool]:
    """Whether memory is returned at each look. `left`: what remains afterwards."""
    surplus, found = Surplus(), []
    for now in (REST,) * LOOKS_BETWEEN + memory:
        found.append(surplus.is_worth_returning(now))
        if found[-1]:
            surplus.returned(left)
    return found[LOOKS_BETWEEN:]


def test_memory_is_returned_once_when_a_burst_is_over() -> None:
    assert returns(BURST, BURST, REST, REST) == [False, True, False, False]


def test_little_memory_is_not_returned() -> None:
    assert not any(returns(BURST - 1, BURST - 1, BURST - 1))


def test_memory_that_grows_is_in_use() -> None:
    assert not any(returns(*(BURST + step * CALM_BYTES for step in range(8))))
    assert any(returns(*(BURST + step * (CALM_BYTES - 1) for step in range(2))))


def test_memory_that_was_in_use_is_returned_later() -> None:
    assert sum(returns(*(BURST,) * 3 * LOOKS_BETWEEN, left=BURST)) == 3


def test_returns_are_rare_while_bursts_come_again() -> None:
    assert sum(returns(*(BURST,) * 3 * LOOKS_BETWEEN)) == 3


def test_a_router_looks_at_its_own_memory() -> None:
    async def wait_for_a_return() -> None:
        loop, returned = asyncio.get_running_loop(), asyncio.Event()
        task = asyncio.create_task(return_freed_memory(lambda: note(loop, returned), 0.01))
        await asyncio.sleep(0.03 * LOOKS_BETWEEN)
        assert not returned.is_set()
        with mmap.mmap(-1, 8 * WORTH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
            held.write(bytes(len(held)))  # numpy would reuse memory that earlier tests have freed
            await asyncio.wait_for(returned.wait(), HANG_GUARD_S)
        await end([task])

    asyncio.run(wait_for_a_return())


def note(loop: asyncio.AbstractEventLoop, returned: asyncio.Event) -> None:
    loop.call_soon_threadsafe(returned.set)


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_the_router_s_background_returns_memory() -> None:
    async def names() -> set[str]:
        nobody = Tenants()
        keys, log = RouterKeys(nobody, nobody), Logger("r", io.StringIO())
        tasks = start_background(RouterProcessConfig(), keys, log, lambda: 0, None, None)
        await end(tasks)
        return {getattr(task.get_coro(), "__name__", "") for task in tasks}

    assert {"return_freed_memory", "run_full_collections"} <= asyncio.run(names())
