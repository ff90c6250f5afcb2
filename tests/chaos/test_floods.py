"""An outsider floods the ports between routers and nodes, with and without keys: no process grows beyond its bound or
ends, and honest streams go on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.fuzz.fuzz_cluster import FuzzCluster
from tests.support.fuzz.fuzz_memory import MOST_GROWTH, MemoryWatch, growth, held
from tests.support.fuzz.fuzz_outsider import Outsider
from tests.support.web.mixed_clients import make_client, stream

FLOOD_S = 15.0


@pytest.mark.parametrize("has_keys", [True, False], ids=["keys", "no_keys"])
def test_a_flood_from_outside_ends_nobody(tmp_path: Path, has_keys: bool) -> None:
    """With keys an outsider gets no further than the handshake: a message that never ends does not begin there. Without
    keys huge whole messages from several connections at once still take more than this bound (docs/security.md)."""
    cluster = FuzzCluster(tmp_path, has_keys=has_keys)
    try:
        asyncio.run(serve(cluster, 2.0))  # what they hold at work
        rest = held(cluster.processes)
        with MemoryWatch(cluster.processes) as watch:
            endpoints = [cluster.routers[0].nodes, *cluster.node_endpoints()]
            outsider = Outsider(endpoints, cluster.servers(), has_giants=has_keys)
            try:
                assert asyncio.run(serve(cluster, FLOOD_S)) > 0
            finally:
                outsider.stop()
        cluster.check_alive()
        cluster.check_whole()
        grown = growth(rest, watch.most)
        assert max(grown.values()) <= MOST_GROWTH, grown
        assert outsider.counts["silent"] > 500
        assert outsider.counts["wrong keys"] > 0 and outsider.counts["garbled handshakes"] > 0
        if has_keys:
            assert outsider.counts["turned away"] > 0
            assert outsider.counts["MiB of messages that never end"] == 0
        else:
            assert outsider.counts["cut off"] > 0
    finally:
        cluster.close()


async def serve(cluster: FuzzCluster, seconds: float) -> int:
    """Streams one after another, each checked; how many."""
    until, number = time.monotonic() + seconds, 0
    async with cluster.http() as http:
        while time.monotonic() < until:
            number += 1
            client = make_client(number, 40)
            if not client.fields.get("stop", "x"):
                del client.fields["stop"]
            await stream(http, cluster.url, client)
            assert not client.error, client.error
            client.check()
    return number
