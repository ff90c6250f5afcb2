"""Many silent clients at a port with TLS: the oldest handshakes end, so the limit and the descriptors hold."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import socket
from collections.abc import Callable, Iterator
from typing import cast
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from router.http.protocol import MOST_LINGERING, HttpRules
from router.http.server import bind_http
from router.http.tls_port import TlsPort
from shared.config.settings.http_settings import HttpConfig
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.metrics import RequestMetrics
from tests.support.machine.patience import HANG_GUARD_S

Dial = Callable[[int], list[socket.socket]]
LIMIT = 4 + MOST_LINGERING
TICKS = 20  # rounds of the loop, for tasks that were ended


class Scarce:
    """A listener for which there are `left` descriptors, and after one failure any number."""

    def __init__(self, listener: socket.socket, left: int) -> None:
        self._listener, self._left, self.num_failed = listener, left, 0
        self.fileno = listener.fileno

    def accept(self) -> tuple[socket.socket, object]:
        if self._left <= 0 and not self.num_failed:
            self.num_failed += 1
            raise OSError(errno.EMFILE, "Too many open files")
        accepted = self._listener.accept()
        self._left -= 1
        return accepted


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bind_http("127.0.0.1", 0) as listener:
        yield listener


@pytest.fixture
def dial(listener: socket.socket) -> Iterator[Dial]:
    with contextlib.ExitStack() as stack:
        address = listener.getsockname()
        yield lambda count: [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


def open_port(listener: socket.socket, registry: CollectorRegistry) -> TlsPort:
    limits = HttpConfig(max_connections=4, header_timeout_s=HANG_GUARD_S)
    rules = HttpRules(limits, RequestMetrics(registry), LogOnce(Logger("r", io.StringIO())), 1, 1.0)
    return TlsPort(listener, Mock(), rules, (), Mock(), Mock())


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_GUARD_S):
        while not what():
            await asyncio.sleep(0)
    for _ in range(TICKS):
        await asyncio.sleep(0)


def test_a_burst_of_silent_clients_stays_within_the_limit(listener: socket.socket, dial: Dial) -> None:
    registry = CollectorRegistry()
    clients = dial(3 * LIMIT)

    def num_refused() -> float:
        return registry.get_sample_value("baton_requests_total", {"outcome": "too_many_connections"}) or 0

    async def burst() -> list[bool]:
        port = open_port(listener, registry)
        await until(lambda: num_refused() == 2 * LIMIT)
        found = [is_open(client) for client in clients]
        port.close()
        await port.wait_closed()
        return found

    assert asyncio.run(burst()) == [False] * 2 * LIMIT + [True] * LIMIT
    assert not any(map(is_open, clients))


def test_without_descriptors_the_oldest_handshake_ends(listener: socket.socket, dial: Dial) -> None:
    clients = dial(3)
    scarce = Scarce(listener, 2)

    async def burst() -> list[bool]:
        port = open_port(cast(socket.socket, scarce), CollectorRegistry())
        await until(lambda: scarce.num_failed == 1)
        found = [is_open(client) for client in clients]
        port.close()
        await port.wait_closed()
        return found

    assert asyncio.run(burst()) == [False, True, True]
    assert not any(map(is_open, clients)), "the third was accepted without a rest"
