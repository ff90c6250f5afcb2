"""What systemd hears of a router and of a node: a datagram socket stands in for it."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.app import tell_manager
from shared.config.machine.systemd import NotifySocket, notify_socket
from shared.node.loop.daemon import Daemon
from shared.observe.log import Logger
from shared.observe.service_manager import ServiceManager
from tests.support.cores.core_rig import CoreKnobs
from tests.support.machine.service_manager import Manager
from tests.support.worlds.node_pair import make_node
from tests.unit.shared.node.test_node_rounds import Line

WATCHDOG_US = 30_000_000


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    here = Manager(str(tmp_path / "notify") if request.param == "path" else f"\0baton-{os.getpid()}")
    yield here
    here.close()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_hears_ready_signs_of_life_and_the_end(manager: Manager) -> None:
    clock = Clock()
    process = ServiceManager(NotifySocket(manager.address, WATCHDOG_US), clock)
    assert manager.heard() == []
    for leaving in (False, False):
        process.tell(is_leaving=leaving)
    assert manager.heard() == [["READY=1", f"WATCHDOG_USEC={WATCHDOG_US}", "WATCHDOG=1"]]
    clock.now = 9.9
    process.tell(is_leaving=False)
    assert manager.heard() == []
    clock.now = 10.0  # a third of the watchdog's time
    process.tell(is_leaving=False)
    assert manager.heard() == [["WATCHDOG=1"]]
    for now in (10.1, 10.2, 20.0):  # it lives while it drains
        clock.now = now
        process.tell(is_leaving=True)
    assert manager.heard() == [["STOPPING=1"], ["WATCHDOG=1"]]
    process.close()
    assert manager.heard() == [["WATCHDOG_USEC=0"]]
    process.tell(is_leaving=True)  # after the end nothing is sent
    process.close()


def test_what_a_full_queue_refuses_is_said_again(tmp_path: Path) -> None:
    """Without "ready" systemd would end a process that serves. And no call waits: the loop that serves would stand."""
    manager, clock = Manager(str(tmp_path / "notify")), Clock()
    process = ServiceManager(NotifySocket(manager.address, WATCHDOG_US), clock)
    filling = manager.fill()
    process.tell(is_leaving=False)
    process.tell(is_leaving=False)
    assert manager.heard() == filling
    process.tell(is_leaving=True)
    process.tell(is_leaving=True)
    assert manager.heard() == [["READY=1", f"WATCHDOG_USEC={WATCHDOG_US}", "STOPPING=1", "WATCHDOG=1"]]
    process.close()
    manager.close()


def test_a_socket_that_is_gone_disturbs_nobody(tmp_path: Path) -> None:
    process = ServiceManager(NotifySocket(str(tmp_path / "nobody"), WATCHDOG_US))
    process.tell(is_leaving=False)
    process.close()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, NotifySocket()),
        ({"NOTIFY_SOCKET": "/run/systemd/notify"}, NotifySocket("/run/systemd/notify")),
        ({"NOTIFY_SOCKET": "@a@b", "WATCHDOG_USEC": "7"}, NotifySocket("\0a@b", 7)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "7", "WATCHDOG_PID": str(os.getpid())}, NotifySocket("/n", 7)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "7", "WATCHDOG_PID": "1"}, NotifySocket("/n")),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "soon"}, NotifySocket("/n")),
        ({"NOTIFY_SOCKET": "vsock:2:1", "WATCHDOG_USEC": "7"}, NotifySocket()),
        ({"WATCHDOG_USEC": "7"}, NotifySocket()),
    ],
)
def test_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: NotifySocket
) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert notify_socket() == place


def test_each_round_of_a_node_s_loop_is_a_sign_of_life(manager: Manager) -> None:
    clock = Clock()
    process = ServiceManager(NotifySocket(manager.address, WATCHDOG_US), clock)
    node = make_node("decode", "d0", CoreKnobs())
    line = Line([], [])
    daemon = Daemon(node, line, Logger("d", io.StringIO()), 1.0, clock, manager=process)
    assert manager.heard() == []
    for now, stops in ((0.0, False), (5.0, False), (10.0, False), (10.1, True)):
        clock.now = now
        if stops:
            daemon.stop()
        daemon.round()
    assert [lines[-1] for lines in manager.heard()] == ["WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"]
    process.close()


@pytest.mark.parametrize("stops", [True, False])
def test_a_router_speaks_from_the_loop_that_serves(manager: Manager, stops: bool) -> None:
    """And says that it ends, also if it ends before the next turn."""
    is_stopping = False

    async def serve() -> None:
        nonlocal is_stopping
        process = ServiceManager(NotifySocket(manager.address))
        task = asyncio.create_task(tell_manager(process, lambda: is_stopping))
        assert manager.heard() == []  # the loop has not turned yet
        await asyncio.sleep(0)
        assert manager.heard() == [["READY=1"]]
        is_stopping = stops
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert manager.heard() == [["STOPPING=1"]] and not process.listens

    asyncio.run(serve())
