"""Events that nobody reads keep neither libzmq nor the end of a socket waiting."""

from __future__ import annotations

import pytest

from tests.support.machine.own_process import printed

MANY_CALLERS = """
import socket, sys, time
from shared.wire.codec import encode
from shared.wire.zeromq.link import NodeLinks
from shared.wire.messages import Goodbye
from tests.support.wire.raw_zmtp import RawPeer

links = NodeLinks("d", 1)
port = int(links.endpoint.rpartition(":")[2])
for _ in range(1000):  # each makes two events or three
    socket.create_connection(("127.0.0.1", port)).close()
    time.sleep(0.0005)  # a full backlog would cost a second
peer = RawPeer(links.endpoint, "p@1")  # libzmq answers its handshake
if "read" in sys.argv:
    peer.frame(encode(Goodbye("p", 1)))
    while "p@1" not in links._router._routes:
        links.poll(0.02)
links.close()
print("closed")
"""


@pytest.mark.parametrize("then", ["read", "close"])
def test_events_that_nobody_reads_stop_no_socket(then: str) -> None:
    """The defect: after 750 unread callers libzmq answered nobody, and a socket's end waited for ever."""
    assert printed(MANY_CALLERS, then) == "closed"
