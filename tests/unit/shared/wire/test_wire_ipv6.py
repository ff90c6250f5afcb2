"""Links over IPv6, on real loopback sockets."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from shared.core.keys import RequestKey
from shared.wire.codec import to_wire
from shared.wire.keys.key_files import NODE
from shared.wire.keys.keyring import KeyRing
from shared.wire.messages import Abort
from shared.wire.peers import Received
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions
from tests.support.clusters.key_folders import make_keys
from tests.support.wire.node_links import next_message

ABORT = Abort(to_wire(RequestKey("r", 1, "rid", 0, 0)), False)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


def options(folder: Path, name: str) -> LinkOptions:
    return LinkOptions(ring=KeyRing(folder, NODE, name))


@pytest.mark.parametrize("has_keys", [False, True], ids=["no keys", "keys"])
def test_nodes_reach_each_other(tmp_path: Path, has_keys: bool) -> None:
    """A node waited for ever for a router at an IPv6 address."""
    folder = make_keys(tmp_path / "keys", nodes=("p", "d"))
    p, d = (options(folder, name) if has_keys else LinkOptions() for name in "pd")
    with closing(NodeLinks("d", 8, "tcp://[::1]:*", d)) as decode, closing(NodeLinks("p", 7, options=p)) as prefill:
        assert decode.endpoint.startswith("tcp://[::1]:")
        prefill.dial("d@8", decode.endpoint)
        assert prefill.send("d@8", ABORT)
        assert next_message(decode) == Received("p@7", ABORT)
        assert decode.send("p@7", ABORT)
        assert next_message(prefill) == Received("d@8", ABORT)
        assert prefill._watch._connections and decode._watch._connections, "the watch bounds their memory"
