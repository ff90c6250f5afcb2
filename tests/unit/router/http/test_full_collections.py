"""A router's full garbage collections run while few requests are open, and nothing that ends needs one."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from typing import Any

import pytest

from router.api.site.generation import Generation
from router.http.connection import Connection
from router.http.full_collections import (
    FEW_OPEN,
    LOOKS_BETWEEN,
    MOST_LOOKS,
    MUCH_GARBAGE,
    NEVER,
    SHORT_S,
    STREAM_BYTES,
    FullCollections,
    run_full_collections,
)
from router.policy.placement import NODES_AWAY_S
from router.requests.effects import Failure, Update
from router.text.hashlm import HashTokenizer
from shared.core.errors import NodeLost, NoNodes
from shared.observe.metrics import RequestMetrics
from shared.wire.messages import Key, SequenceEnd
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.router_rig import RouterRig
from tests.unit.router.answers.test_router_exchange import PLAN, CollectorRegistry, Exchange, Waiting, written

REST = 100 << 20


def due(collections: FullCollections, *looks: tuple[int, int], took_s: float = 0.0, num_freed: int = 0) -> list[bool]:
    """Whether each look, as (open requests, memory), finds a collection due. It then runs, and frees no memory."""
    found = []
    for num_open, memory in looks:
        found.append(collections.is_due(num_open, memory))
        if found[-1]:
            collections.ran(memory, took_s, num_freed)
    return found


def numbers(found: list[bool]) -> list[int]:
    """Return the numbers of the looks that found a collection due."""
    return [look for look, is_due in enumerate(found, 1) if is_due]


def test_a_router_with_few_requests_collects_once_a_minute() -> None:
    found = due(FullCollections(), *[(FEW_OPEN - 1, REST)] * 2 * LOOKS_BETWEEN)
    assert numbers(found) == [LOOKS_BETWEEN, 2 * LOOKS_BETWEEN]


def test_long_collections_wait_until_no_request_is_open() -> None:
    """A page index may make a collection long, with few requests open, too."""
    collections = FullCollections()
    assert any(due(collections, *[(1, REST)] * LOOKS_BETWEEN, took_s=SHORT_S))
    assert not any(due(collections, *[(1, REST)] * 3 * LOOKS_BETWEEN))
    assert due(collections, (0, REST)) == [True]


def test_a_collection_that_freed_much_tells_nothing_of_the_next() -> None:
    """It took long because of what it freed."""
    for num_freed, expected in ((MUCH_GARBAGE - 1, []), (MUCH_GARBAGE, [LOOKS_BETWEEN])):
        collections = FullCollections()
        due(collections, *[(1, REST)] * LOOKS_BETWEEN, took_s=SHORT_S, num_freed=num_freed)
        assert numbers(due(collections, *[(1, REST)] * 2 * LOOKS_BETWEEN, took_s=SHORT_S)) == expected


def test_a_router_that_is_always_busy_collects_once_an_hour() -> None:
    """Memory that Python can't return hides how much of it is garbage."""
    collections = FullCollections()
    doubled = 2 * REST + FEW_OPEN * STREAM_BYTES
    assert any(due(collections, (FEW_OPEN, REST), (FEW_OPEN, doubled)))
    assert numbers(due(collections, *[(FEW_OPEN, doubled)] * 2 * MOST_LOOKS)) == [MOST_LOOKS, 2 * MOST_LOOKS]


def test_a_busy_router_collects_only_when_memory_doubled() -> None:
    collections, doubled = FullCollections(), 2 * REST + FEW_OPEN * STREAM_BYTES
    assert not any(due(collections, *[(FEW_OPEN, REST)] * 3 * LOOKS_BETWEEN, (FEW_OPEN, doubled - 1)))
    assert due(collections, (FEW_OPEN, doubled), (FEW_OPEN, doubled)) == [True, False]


def test_memory_that_fell_counts_from_its_lowest() -> None:
    looks = [(FEW_OPEN, memory * REST) for memory in (4, 1, 3)]
    assert due(FullCollections(), *looks) == [False, False, True]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 collects old objects little by little")
def test_python_starts_no_full_collection_meanwhile() -> None:
    before = gc.get_threshold()

    async def thresholds() -> tuple[int, int, int]:
        ran = asyncio.Event()
        task = asyncio.create_task(run_full_collections(lambda: 0, lambda: ran.set() or 0, 0.001))
        await asyncio.wait_for(ran.wait(), HANG_GUARD_S)
        found = gc.get_threshold()
        task.cancel()
        await asyncio.wait([task])
        return found

    assert asyncio.run(thresholds()) == (*before[:2], NEVER)
    assert gc.get_threshold() == before


@pytest.mark.parametrize("ends", ["whole", "hangs up", "fails"])
def test_an_answer_that_ended_leaves_no_garbage(ends: str) -> None:
    class Sink:
        status = 200 if ends == "fails" else None  # then the headers are out
        header, tenant, trace = staticmethod(lambda name: None), PLAN, ""

        async def start(self, *given: Any) -> None:
            if ends == "hangs up":
                raise asyncio.CancelledError

        async def write(self, data: bytes, *, last: bool = False) -> None: ...

    async def run() -> weakref.ref[Generation]:
        news = Waiting(*failing_answer() if ends == "fails" else whole_answer())
        made = Generation(PLAN, written, HashTokenizer(), news, RequestMetrics(CollectorRegistry()), 0.0)  # type: ignore[arg-type]
        task = asyncio.create_task(made.run(Sink()))  # type: ignore[arg-type]
        await asyncio.wait([task])
        assert task.cancelled() == (ends == "hangs up")
        return weakref.ref(made)

    gc.disable()
    try:
        assert asyncio.run(run())() is None
    finally:
        gc.enable()


def test_a_request_failing_before_its_headers_leaves_no_garbage() -> None:
    left: list[weakref.ref[Generation]] = []

    async def handler(connection: Connection) -> None:
        news = Waiting(Failure("r", NodeLost("gone")))
        made = Generation(PLAN, written, HashTokenizer(), news, RequestMetrics(CollectorRegistry()), 0.0)  # type: ignore[arg-type]
        left.append(weakref.ref(made))
        await made.run(connection)

    gc.disable()
    try:
        exchange = Exchange(handler)
        assert exchange.sent[0]["status"] == NodeLost.status
        assert left[0]() is None
    finally:
        gc.enable()


def test_a_request_without_nodes_leaves_no_garbage() -> None:
    """The error of a client that has hung up reaches no endpoint."""
    rig = RouterRig()
    node = rig.join("decode", "d")
    rig.dispatcher.tick(0.0)
    rig.registry.remove(node)
    rig.open()  # it waits for nodes
    gc.disable()
    try:
        (failure,) = rig.dispatcher.tick(2 * NODES_AWAY_S).news
        assert isinstance(failure, Failure) and isinstance(failure.error, NoNodes)
        left = weakref.ref(failure.error)
        del failure
        assert left() is None
    finally:
        gc.enable()


def failing_answer() -> list[Any]:
    return [Update("r", 0, [65, 66, 67, 68], [], None), Failure("r", NodeLost("gone"))]


def whole_answer() -> list[Any]:
    end = SequenceEnd(Key("r", 1, "r", 0, 0), "length", 5, 0, "", "")
    return [Update("r", 0, [65, 66, 67, 68], [], None), Update("r", 0, [69], [], end)]
