"""The fault-injecting proxy: what passes is what was sent; each fault does what it says; a trap strikes once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from shared.wire.link import NodeLinks, open_router
from shared.wire.link_options import LinkOptions
from shared.wire.messages import Abort, Goodbye, Key, Message, Ready, Welcome
from shared.wire.peers import PeerClosed, PeerUp, Received
from tests.support.patience import HANG_GUARD_S
from tests.support.proxy import FaultProxy, Seen, Trap

OPTIONS = LinkOptions(heartbeat_ms=100, heartbeat_timeout_ms=2000, reconnect_max_ms=100)


class Ends:
    """A node that dials a router through the proxy."""

    def __init__(self, rewrite: Callable[[Seen], Message | None] = lambda seen: None) -> None:
        self.proxy = FaultProxy(rewrite)
        self.context, _, self.router = open_router("tcp://127.0.0.1:*", OPTIONS)
        self.link = self.proxy.link("router", self.router.endpoint)
        self.node = NodeLinks("n", 7, options=OPTIONS)
        self.node.dial("r", self.link.endpoint)
        self.at_node: list[object] = []
        self.at_router: list[object] = []
        self.until(lambda: PeerUp("r") in self.at_node)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():
            assert time.monotonic() < deadline, (self.at_node, self.at_router)
            self.look()

    def look(self) -> None:
        self.at_node += self.node.poll(0.01)
        self.at_router += self.router.receive()

    def kinds(self) -> list[str]:
        return [type(i.message).__name__ for i in self.at_router if isinstance(i, Received)]

    def close(self) -> None:
        self.node.close()
        self.router.close()
        self.context.term()
        self.proxy.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def abort(rid: str) -> Abort:
    return Abort(Key("r", 1, rid, 0, 0), all_sequences=True)


def ready(num_pages: int) -> Ready:
    numbers = list(range(num_pages))
    return Ready(Key("r", 1, "a", 0, 0), 1, 0, numbers, numbers, numbers, None, True, 0, 0, b"", 0)


def test_both_ways_and_with_page_frames(ends: Ends) -> None:
    pages = [bytes([i]) * size for i, size in enumerate((0, 255, 256, 100_000))]
    ends.node.send("r", ready(4), pages)
    ends.until(lambda: len(ends.at_router) == 1)
    received = ends.at_router[0]
    assert isinstance(received, Received) and received.peer == "n@7"
    assert [bytes(frame) for frame in received.frames] == pages
    assert ends.router.send("n@7", Welcome("r", 1, 1))
    ends.until(lambda: Received("r", Welcome("r", 1, 1)) in ends.at_node)
    assert ends.proxy.passed == {"Ready": 1, "Welcome": 1}


@pytest.mark.parametrize("passes_on", [True, False])
def test_a_trap_strikes_at_the_nth_message_and_ends_the_connection(ends: Ends, passes_on: bool) -> None:
    struck: list[Seen] = []
    trap = Trap(lambda seen: isinstance(seen.message, Abort), struck.append, nth=2, passes_on=passes_on)
    ends.proxy.traps.append(trap)
    for message in (abort("1"), Goodbye("n", 7), abort("2")):
        ends.node.send("r", message)
    ends.until(lambda: PeerClosed("r") in ends.at_node and PeerClosed("n@7") in ends.at_router)
    assert ends.kinds() == ["Abort", "Goodbye", "Abort"][: 3 if passes_on else 2]
    assert [(seen.sender, seen.receiver, seen.message) for seen in struck] == [("n", "router", abort("2"))]
    ends.until(lambda: ends.at_node[-1] == PeerUp("r"))  # it dials again
    ends.node.send("r", abort("3"))
    ends.until(lambda: ends.kinds()[-1:] == ["Abort"] and ends.at_router[-1] == Received("n@7", abort("3")))
    assert len(struck) == 1


def test_a_held_link_is_noticed_by_silence_and_lets_go_again(ends: Ends) -> None:
    ends.link.held = True
    ends.node.send("r", abort("1"))
    ends.until(lambda: PeerClosed("r") in ends.at_node)
    assert not ends.kinds()
    ends.link.held = False
    ends.until(lambda: ends.at_node[-1] == PeerUp("r"))


def test_a_cut_and_refused_link(ends: Ends) -> None:
    ends.node.send("r", abort("1"))
    ends.until(lambda: ends.kinds() == ["Abort"])
    ends.link.refused = True
    ends.proxy.cut("router")
    ends.until(lambda: PeerClosed("r") in ends.at_node and PeerClosed("n@7") in ends.at_router)
    ends.link.refused = False
    ends.until(lambda: ends.at_node[-1] == PeerUp("r"))


def test_a_slow_link_loses_nothing(ends: Ends) -> None:
    ends.link.delay_s, ends.link.bytes_per_s = 0.001, 1e6
    for i in range(50):
        ends.node.send("r", abort(str(i)))
    ends.until(lambda: len(ends.kinds()) == 50)
    assert [i.message.key.rid for i in ends.at_router if isinstance(i, Received)] == [str(i) for i in range(50)]


def test_a_message_can_be_rewritten() -> None:
    ends = Ends(lambda seen: abort("other") if isinstance(seen.message, Abort) else None)
    try:
        ends.node.send("r", abort("one"))
        ends.until(lambda: ends.at_router == [Received("n@7", abort("other"))])
    finally:
        ends.close()
