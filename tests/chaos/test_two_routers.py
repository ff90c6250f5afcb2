"""Two routers share the nodes, and one of them is killed: the other one's streams never notice; it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.clusters.chaos_cluster import ChaosCluster, chaos_cluster, router_process
from tests.support.clusters.router_process import RouterProcess
from tests.support.web.sdk_clients import check_whole_or_broken, fresh_clients, run_clients, stream_all


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    with chaos_cluster(tmp_path_factory.mktemp("two"), nodes=("p0", "d0"), routers=2) as cluster:
        yield cluster


def test_one_of_two_routers_is_killed(cluster: ChaosCluster) -> None:
    kept, lost = fresh_clients(max_tokens=300), fresh_clients(max_tokens=2000)
    doomed = cluster.routers[1]

    async def kill_it() -> None:
        while not all(client.num_tokens for client in (*kept, *lost)):
            await asyncio.sleep(0.01)
        doomed.process.kill()

    async def both() -> None:
        await asyncio.gather(stream_all(cluster.url, kept, kill_it), stream_all(doomed.url, lost))

    asyncio.run(both())
    for client in kept:
        client.check()
    assert any(client.error for client in lost)
    for client in lost:
        check_whole_or_broken(client)  # a short answer may have ended before the router did
    doomed.stop()
    cluster.routers[1:] = []
    cluster.check_whole()  # what it had asked for is gone from the nodes
    comes_back(cluster, doomed)


def comes_back(cluster: ChaosCluster, doomed: RouterProcess) -> None:
    """The same name and address, a new epoch, no memory."""
    again = router_process("router1", "--node-endpoint", doomed.nodes)
    cluster.routers.append(again)
    cluster.wait_ready()
    clients = fresh_clients()
    run_clients(again.url, clients)
    for client in clients:
        client.check()
    cluster.check_whole()
