"""How long a peer may be silent: one setting says it, to both ends and for each socket; and a dial is no exception."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq

import router.app
import shared.node.assembly.build_node
from shared.config.processes import NodeParts, RouterProcessConfig
from shared.config.settings.router_settings import RouterConfig
from shared.config.settings.settings import NodeConfig, TimeoutsConfig
from shared.config.settings.silence import link_silence
from shared.device.malloc import give_freed_memory_back
from shared.wire.peers import Inbound, PeerClosed, PeerUp
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions
from tests.support.machine.patience import HANG_GUARD_S


class Opened(Exception):
    """Ends a start as soon as its link is opened; nothing else of a process is wanted here."""


def options_of_router(silence_s: float, monkeypatch: pytest.MonkeyPatch) -> LinkOptions:
    """What `baton router --node-silence-s` opens its socket with."""
    found: list[LinkOptions] = []

    def open_link(endpoint: str, options: LinkOptions) -> None:
        found.append(options)
        raise Opened

    monkeypatch.setattr(router.app, "RouterLink", open_link)
    monkeypatch.setattr(router.app, "capture_libraries", lambda log: None)  # it is for a whole process
    timeouts = TimeoutsConfig(node_silence_s=silence_s)
    with pytest.raises(Opened):
        router.app.run(RouterProcessConfig(router=RouterConfig(port=0), timeouts=timeouts))
    return found[0]


def options_of_node(silence_s: float, monkeypatch: pytest.MonkeyPatch, role: str = "decode") -> LinkOptions:
    found: list[LinkOptions] = []
    monkeypatch.setattr(
        shared.node.assembly.build_node, "NodeLinks", lambda name, epoch, bind, options: found.append(options)
    )
    shared.node.assembly.build_node.open_links(NodeParts(node=NodeConfig(role=role, silence_s=silence_s)), "d", 1, None)
    return found[0]


def test_nobody_says_much_to_a_prefill_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: it took the pages of anybody, 80 MiB of each connection, though it dials all whom it hears."""
    at_prefill = options_of_node(5.0, monkeypatch, "prefill").watch_limits
    assert (at_prefill.caller_bytes, at_prefill.callers_bytes_in_all) == (4 << 20, 32 << 20)
    at_decode = options_of_node(5.0, monkeypatch, "decode").watch_limits
    assert at_decode.caller_bytes == 0 and at_decode.unread_bytes >= 64 << 20, "pages come there"


def test_nodes_return_what_a_flood_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: a prefill node kept 70 MiB after a flood of small messages."""
    assert options_of_node(5.0, monkeypatch).after_burst is give_freed_memory_back


@pytest.mark.parametrize("silence_s", [0.5, 1.0, 5.0, 60.0])
def test_both_ends_wait_as_long_as_they_were_told(silence_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router's sockets gave a node up after 4 s whatever --node-silence-s said: on a slow link everything was cut."""
    for options in (options_of_router(silence_s, monkeypatch), options_of_node(silence_s, monkeypatch)):
        silence = link_silence(silence_s)
        assert (options.heartbeat_ms, options.heartbeat_timeout_ms) == (silence.ping_ms, silence.timeout_ms)
        assert options.heartbeat_ms <= 250 * silence.longest_s, "several beats fit in"
        assert options.watch_limits.mute_s == max(silence.longest_s, 0.75), (
            "three pings of a peer with a longer silence"
        )


def test_sockets_are_opened_with_what_the_options_say() -> None:
    links = NodeLinks("p", 1, options=LinkOptions.for_silence(8.0))
    links.dial("d@2", "tcp://127.0.0.1:9")
    dialled, bound = links._dealers["d@2"].socket, links._router.socket
    wanted = {zmq.HEARTBEAT_IVL: 250, zmq.HEARTBEAT_TIMEOUT: 2417, zmq.CONNECT_TIMEOUT: 4000, zmq.RCVHWM: 0}
    assert {name: dialled.getsockopt(name) for name in wanted} == wanted
    assert bound.getsockopt(zmq.HEARTBEAT_IVL) == 0, "a ping that is due while a full inbox breaks ends the process"
    links.close()


@contextmanager
def black_hole() -> Iterator[socket.socket]:
    """A port where SYNs vanish: its queue is full, and the kernel drops what does not fit in."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        while True:
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.2)
            try:
                filler.connect(address)
            except TimeoutError:
                yield listener
                return


def until(links: NodeLinks, kind: type[Inbound]) -> Inbound:
    end = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < end:
        for inbound in links.poll(0.05):
            if isinstance(inbound, kind):
                return inbound
    raise AssertionError(f"no {kind.__name__}")


def test_a_dial_that_nobody_answers_is_news_and_goes_on() -> None:
    """The kernel alone would go on for two minutes, without a word."""
    links = NodeLinks("p", 1, options=LinkOptions.for_silence(0.5))
    with black_hole() as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        links.dial("d@2", endpoint)
        assert until(links, PeerClosed) == PeerClosed("d@2")
    peer = NodeLinks("d", 2, endpoint)
    assert until(links, PeerUp) == PeerUp("d@2")
    links.close(), peer.close()
