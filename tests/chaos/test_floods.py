"""An outsider floods the ports between routers and nodes, with and without keys: no process grows beyond its bound or
ends, and honest streams go on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import psutil

from tests.support.fuzz_cluster import FuzzCluster
from tests.support.fuzz_outsider import MIB, Outsider
from tests.support.mixed_clients import make_client, stream
from tests.support.patience import HANG_GUARD_S

MOST_GROWTH = 256 * MIB
FLOOD_S = 15.0


def test_a_flood_from_outside_ends_nobody(tmp_path: Path) -> None:
    """Without keys: with them an outsider gets no further than the handshake, which is not flooded here yet."""
    cluster = FuzzCluster(tmp_path, has_keys=False)
    try:
        asyncio.run(serve(cluster, 2.0))  # what they hold at work
        rest = memory(cluster)
        outsider = Outsider([cluster.routers[0].nodes, *cluster.node_endpoints()])
        try:
            most = asyncio.run(flooded(cluster))
        finally:
            outsider.stop()
        cluster.check_alive()
        cluster.check_whole()
        growth = {name: most[name] - size for name, size in rest.items()}
        print({name: f"{size / MIB:.0f} MiB" for name, size in growth.items()}, dict(outsider.counts))
        assert max(growth.values()) <= MOST_GROWTH, growth
        assert outsider.counts["silent"] > 500
        assert outsider.counts["cut off"] > 0
    finally:
        cluster.close()


async def flooded(cluster: FuzzCluster) -> dict[str, int]:
    """The most memory that each process had while streams were served."""
    most = memory(cluster)

    async def watch() -> None:
        while True:
            for name, size in memory(cluster).items():
                most[name] = max(most[name], size)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    try:
        assert await serve(cluster, FLOOD_S) > 0
    finally:
        watching.cancel()
    return most


async def serve(cluster: FuzzCluster, seconds: float) -> int:
    """Streams one after another, each checked; how many."""
    until, number = time.monotonic() + seconds, 0
    async with httpx.AsyncClient(timeout=HANG_GUARD_S) as http:
        while time.monotonic() < until:
            number += 1
            client = make_client(number, 40)
            if not client.fields.get("stop", "x"):
                del client.fields["stop"]
            await stream(http, cluster.url, client)
            assert not client.error, client.error
            client.check()
    return number


def memory(cluster: FuzzCluster) -> dict[str, int]:
    processes = {name: node.process for name, node in cluster.nodes.items()} | {"router": cluster.routers[0].process}
    return {name: psutil.Process(process.pid).memory_info().rss for name, process in processes.items()}
