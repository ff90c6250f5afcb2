"""One socket at a time: it is closed when it was closed, and each event says how a dialled connection fares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shared.config.settings.endpoints import KEY_MARK
from shared.wire.keys.key_files import NODE, ROUTER
from shared.wire.keys.keyring import KeyRing
from shared.wire.peers import PeerClosed, PeerUp, WireStats
from shared.wire.zeromq import sockets
from shared.wire.zeromq.link_options import LinkOptions
from shared.wire.zeromq.sockets import DealerSocket, RouterSocket, close_socket, open_monitored
from tests.support.clusters.key_folders import make_keys

Context = zmq.Context[zmq.Socket[bytes]]
OPTIONS = LinkOptions()


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)  # a socket left open would block the end of the context


@pytest.fixture
def dealer(context: Context, tmp_path: Path) -> DealerSocket:
    """Dials where nobody is."""
    return DealerSocket(context, "d@1", f"ipc://{tmp_path}/d", "p@1", OPTIONS, WireStats())


def test_a_closed_socket_and_its_monitor_are_closed(context: Context) -> None:
    socket, monitor = open_monitored(context, zmq.DEALER, OPTIONS, sockets.DEALER_EVENTS)
    assert not socket.closed and not monitor.closed
    close_socket(socket, monitor)
    assert socket.closed and monitor.closed
    close_socket(socket, monitor)  # closing twice is allowed


def test_a_router_s_sockets_are_closed_with_it(context: Context) -> None:
    router = RouterSocket(context, "tcp://127.0.0.1:0", OPTIONS)
    assert not router.socket.closed
    router.close()
    assert router.socket.closed and router.monitor.closed


def test_a_dealer_s_sockets_close_with_it_and_when_it_redials(dealer: DealerSocket) -> None:
    first, monitor = dealer.socket, dealer.monitor
    dealer.again(b"")
    assert first.closed and monitor.closed and not dealer.socket.closed
    dealer.close()
    assert dealer.socket.closed and dealer.monitor.closed


@pytest.mark.parametrize("event", sorted(sockets.SHUT_OUT))
def test_a_handshake_has_failed_until_one_succeeds(dealer: DealerSocket, event: int) -> None:
    assert (dealer.state, dealer.has_failed) == ("dialling", False)
    assert dealer._transition(event) == [PeerClosed("d@1")]
    assert (dealer.state, dealer.has_failed) == ("closed", True)
    assert dealer._transition(zmq.EVENT_CONNECT_RETRIED) == []
    assert (dealer.state, dealer.has_failed) == ("closed", True), "to dial again is no answer yet"
    assert dealer._transition(zmq.EVENT_HANDSHAKE_SUCCEEDED) == [PeerUp("d@1")]
    assert (dealer.state, dealer.has_failed) == ("up", False)
    assert dealer._transition(zmq.EVENT_HANDSHAKE_SUCCEEDED) == []
    assert dealer._transition(zmq.EVENT_DISCONNECTED) == [PeerClosed("d@1")]
    assert (dealer.state, dealer.has_failed) == ("closed", False), "a connection that broke was no failed handshake"


def test_a_peer_leaving_early_without_keys_fails_no_handshake(dealer: DealerSocket) -> None:
    assert dealer._transition(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) == [PeerClosed("d@1")]
    assert not dealer.has_failed


FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


def test_monitors_hear_all_that_is_asked_of_them() -> None:
    dealer = (
        zmq.EVENT_CONNECTED,
        zmq.EVENT_HANDSHAKE_SUCCEEDED,
        zmq.EVENT_DISCONNECTED,
        zmq.EVENT_CONNECT_RETRIED,
        *FAILED,
    )
    router = (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED, *FAILED)
    assert int(sockets.DEALER_EVENTS) == sum(int(event) for event in dealer)
    assert int(sockets.ROUTER_EVENTS) == sum(int(event) for event in router)


@pytest.mark.parametrize(("kind", "name", "has_key"), [(NODE, "p", True), (ROUTER, "router", False)])
def test_a_node_s_address_has_the_key_that_it_listens_under(
    context: Context, tmp_path: Path, kind: str, name: str, has_key: bool
) -> None:
    """A router's own peers know its key from their folders."""
    ring = KeyRing(make_keys(tmp_path / "keys", nodes=("p", "d")), kind, name)
    router = RouterSocket(context, "tcp://127.0.0.1:0", LinkOptions(ring=ring))
    plain = RouterSocket(context, "tcp://127.0.0.1:0", OPTIONS)
    assert router.address.startswith(router.endpoint) and (KEY_MARK in router.address) == has_key
    assert plain.address == plain.endpoint
    router.close(), plain.close()


def test_tries_to_listen_again_are_counted_anew_each_time(context: Context, tmp_path: Path) -> None:
    router = RouterSocket(context, f"ipc://{tmp_path}/r", OPTIONS)
    router.socket.unbind(router.endpoint)
    router._is_bound, router._bind_tries = False, 7
    router._listen_again()
    assert router._is_bound and router._bind_tries == 0
    router.close()
