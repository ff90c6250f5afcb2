"""A whole cluster of real processes with keys: rotation under load, strangers, and what it listens on."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import psutil
import pytest

from deploy import cli
from shared.wire.keys.key_files import NODE, read_pair
from shared.wire.keys.keyring import KeyRing
from shared.wire.messages import Goodbye
from shared.wire.peers import PeerUp
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.clusters.key_folders import forged
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.listening import beyond_loopback, listening
from tests.support.web.mixed_clients import Client, make_client, stream_all

FLAGS = ("--model", "hashlm", "--heartbeat-s", "0.1")
NAMES = ("router", "prefill-0", "decode-0", "decode-1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create = ["keys", "create", str(tmp_path / "keys"), "--router", NAMES[0], "--node", *NAMES[1:], "visitor"]
    assert cli.main(create) == 0
    return tmp_path / "keys"


def refused(cluster: Cluster, node: str, reason: str) -> float:
    return cluster.metrics().get(("baton_refused_total", f'node="{node}",reason="{reason}"'), 0.0)


def family(cluster: Cluster) -> list[int]:
    return [cluster.process.pid, *(child.pid for child in psutil.Process(cluster.process.pid).children(recursive=True))]


def test_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    """With a check of the check: a socket on every address is seen as such."""
    for family_, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with socket.create_server((host, 0), family=family_) as everywhere:
            assert (host, everywhere.getsockname()[1]) in beyond_loopback(listening([os.getpid()]))
    with baton_up(tmp_path / "up.log", *FLAGS) as cluster:
        sockets = listening(family(cluster))
        assert len(sockets) >= 4, "the API, the port that nodes dial, and one port of each node"
        assert beyond_loopback(sockets) == []


def test_keys_of_all_are_rotated_under_streams(tmp_path: Path, folder: Path) -> None:
    """Nobody is restarted, every stream that runs meanwhile is whole, and the old keys open nothing any more."""
    clients: list[Client] = []
    old = read_pair(folder, "prefill-0")

    async def rotate_all(url: str) -> None:
        """Two streams end after each step that began after it, while long ones run through all of them."""
        clients.extend(make_client(index, 1500) for index in range(4))
        long_ones = asyncio.create_task(stream_all(url, clients[:4]))
        for name in NAMES:
            for step in ((), ("--use",), ("--drop-old",)):
                assert cli.main(["keys", "rotate", str(folder), name, *step]) == 0
                during = [make_client(100 + len(clients) + i, 150) for i in range(2)]
                clients.extend(during)
                await asyncio.gather(stream_all(url, during), asyncio.sleep(1.0))  # it takes effect within a second
        await long_ones

    with baton_up(tmp_path / "up.log", *FLAGS, "--decode", "2", "--transport", "zmq", "--keys", str(folder)) as cluster:
        pids = family(cluster)
        asyncio.run(rotate_all(cluster.url))
        for client in clients:
            client.check()
        assert family(cluster) == pids, "nobody was restarted"
        refusals = refused(cluster, "router", "key")
        late_ring = forged(folder, NODE, "prefill-0", tmp_path / "late", old)
        late = NodeLinks("prefill-0", 1, options=LinkOptions(ring=late_ring))
        (endpoint,) = node_endpoints(cluster)
        late.dial(endpoint, endpoint)
        seen: list[object] = []

        def is_refused() -> bool:
            seen.extend(late.poll(0.05))
            return refused(cluster, "router", "key") > refusals

        cluster.eventually(is_refused, "the old key is refused")
        assert not any(isinstance(inbound, PeerUp) for inbound in seen)
        late.close()
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
        assert cluster.pages_partition()


def node_endpoints(cluster: Cluster) -> list[str]:
    """Where the router waits for nodes."""
    (router,) = [pid for pid in family(cluster) if "router" in psutil.Process(pid).cmdline()]
    return [f"tcp://127.0.0.1:{port}" for _, port in listening([router]) if port != cluster.port]


def test_strangers_get_in_nowhere(tmp_path: Path, folder: Path) -> None:
    """At the router's port and at each node's: no key, a key of one's own, another's name. Each is counted where it
    knocked, and streams go on."""
    ring = forged(folder, NODE, "visitor", tmp_path / "forged")
    with baton_up(tmp_path / "up.log", *FLAGS, "--decode", "1", "--keys", str(folder)) as cluster:
        plain, stranger = NodeLinks("visitor", 1), NodeLinks("visitor", 1, options=LinkOptions(ring=ring))
        ports = [port for _, port in listening(family(cluster)) if port != cluster.port]
        assert len(ports) == 3
        for port in ports:
            plain.dial(endpoint := f"tcp://127.0.0.1:{port}", endpoint)
            stranger.dial(endpoint, endpoint)
        seen: list[object] = []

        def all_refused() -> bool:
            for links in (plain, stranger):
                seen.extend(links.poll(0.05))
            return all(refused(cluster, node, "key") >= 2 for node in ("router", "prefill-0", "decode-0"))

        cluster.eventually(all_refused, "all three count what they refused")
        assert not any(isinstance(inbound, PeerUp) for inbound in seen)
        clients = [make_client(index, 40) for index in range(4)]
        asyncio.run(stream_all(cluster.url, clients))
        for client in clients:
            client.check()
        plain.close(), stranger.close()


def test_an_allowed_node_that_says_another_s_name(tmp_path: Path, folder: Path) -> None:
    router = RouterProcess("--keys", str(folder))
    liar = NodeLinks("decode-0", 1, options=LinkOptions(ring=KeyRing(folder, NODE, "visitor")))
    try:
        liar.dial(router.nodes, router.nodes)
        liar.send(router.nodes, Goodbye("decode-0", 1))
        eventually(lambda: router.metric('baton_refused_total{node="router",reason="identity"}') == 1.0)
        assert sum("its key is that of visitor" in line for line in router.lines) == 1
    finally:
        liar.close()
        assert router.stop() == 0


def test_a_router_that_waits_on_every_address_with_keys(folder: Path) -> None:
    """Allowed with keys; the HTTP API stays where it is."""
    router = RouterProcess("--keys", str(folder), "--node-endpoint", "tcp://0.0.0.0:0")
    try:
        sockets = listening([router.process.pid])
        assert [address for address, _ in beyond_loopback(sockets)] == ["0.0.0.0"]
        assert len(sockets) == 2
    finally:
        assert router.stop() == 0
