"""GET /ready of a node: what it says, when, and to whom it does not listen for long."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from shared.core.errors import ConfigError
from shared.node.loop.daemon import Daemon
from shared.node.machine.ready_port import HANGS, LEAVING, MOST_CALLERS, NO_ROUTER, SLOW_CALLER_S, ReadyPort
from shared.node.records.departure import Departure
from shared.observe.log import Logger
from tests.support.cores.core_rig import CoreKnobs
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import Net, make_node, name_of
from tests.unit.shared.node.test_node_rounds import Line

SILENCE_S = 5.0


class Watch:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Watch:
    return Watch()


@pytest.fixture
def port(clock: Watch) -> Iterator[ReadyPort]:
    opened = ReadyPort("127.0.0.1", 0, SILENCE_S, clock)
    yield opened
    opened.close()


def ask(port: ReadyPort, path: str = "/ready") -> tuple[int, str]:
    answer = httpx.get(f"http://127.0.0.1:{port.port}{path}", timeout=HANG_GUARD_S)
    return answer.status_code, answer.text.strip()


def test_what_a_node_says_of_itself(port: ReadyPort, clock: Watch) -> None:
    assert ask(port) == (503, NO_ROUTER)
    port.tell(is_served=True, is_leaving=False)
    assert ask(port) == (200, "yes")
    clock.now += SILENCE_S + 0.1
    assert ask(port) == ask(port, "/live") == (503, HANGS)
    port.tell(is_served=True, is_leaving=True)
    assert ask(port) == (503, LEAVING)
    assert ask(port, "/live") == (200, "yes")
    port.tell(is_served=False, is_leaving=False)
    assert ask(port) == (503, NO_ROUTER)


def test_no_other_path_and_no_other_program_are_named(port: ReadyPort) -> None:
    status, text = ask(port, "/metrics")
    assert status == 404 and "Python" not in text
    answer = httpx.get(f"http://127.0.0.1:{port.port}/ready", timeout=HANG_GUARD_S)
    assert answer.headers["server"] == "baton"


def test_a_caller_who_says_nothing_holds_nobody_up_for_long(port: ReadyPort) -> None:
    port.tell(is_served=True, is_leaving=False)
    with socket.create_connection(("127.0.0.1", port.port)):
        assert ask(port) == (200, "yes")


def test_dripping_callers_hold_up_neither_probes_nor_the_end() -> None:
    port = ReadyPort("127.0.0.1", 0, SILENCE_S)
    callers = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(MOST_CALLERS + 8)]
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(SLOW_CALLER_S / 5):
            for caller in callers:
                with contextlib.suppress(OSError):
                    caller.send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        began = time.monotonic()
        assert ask(port) == (503, NO_ROUTER)
        port.close()
        assert time.monotonic() - began < HANG_GUARD_S / 2
        callers[0].settimeout(HANG_GUARD_S)
        with contextlib.suppress(ConnectionError):
            assert callers[0].recv(1) == b""
    finally:
        is_over.set()
        dripping.join()
        for caller in callers:
            caller.close()


def test_a_port_that_is_taken_is_told_with_its_flag(port: ReadyPort) -> None:
    with pytest.raises(ConfigError, match=f"--ready-port {port.port}: can't listen on 127.0.0.1: Address already"):
        ReadyPort("127.0.0.1", port.port, SILENCE_S)


def test_a_daemon_tells_of_its_routers_and_of_its_end(port: ReadyPort) -> None:
    node = make_node("decode", "d0", CoreKnobs())
    welcome = list(Net([node]).inboxes[name_of(node)])
    daemon = Daemon(node, Line(welcome, []), Logger("d", io.StringIO()), 1.0, lambda: 0.0, ready=port)
    daemon.round()
    assert ask(port) == (200, "yes")
    node.ctx.leaving = Departure(then="stop")
    daemon.round()
    assert ask(port) == (503, LEAVING)
    node.ctx.leaving = None
    for link in node.ctx.routers.served():
        link.session.life = None
    daemon.round()
    assert ask(port) == (503, NO_ROUTER)
