"""Nodes of several ranks as real processes: streams are the oracle's, and a lost rank ends its whole node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, baton_up
from mixed_clients import make_client, stream_all, wait_until

FLAGS = ("--model", "hashlm", "--heartbeat-s", "0.1", "--node-silence-s", "3", "--silence-s", "3")


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with baton_up(tmp_path / "up.log", *FLAGS, *request.param) as cluster:
        yield cluster


def ranks_of(cluster: Cluster, node_id: str) -> list[psutil.Process]:
    """The processes that a node has beside itself."""
    found = []
    for child in psutil.Process(cluster.node_pid(f"--node-id={node_id}")).children():
        with contextlib.suppress(psutil.Error):
            if f"--of={node_id}" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.parametrize(
    ("cluster", "sizes"),
    [
        (("--decode-tp", "4", "--transport", "zmq"), (1, 4)),
        (("--tp", "4", "--decode-tp", "1", "--spec", "eagle"), (4, 1)),
        (("--tp", "2", "--decode-tp", "4", "--spec", "ngram"), (2, 4)),
        (("--dp", "3"), (1, 3)),
    ],
    indirect=["cluster"],
)
def test_streams_of_any_pair_are_the_oracles(cluster: Cluster, sizes: tuple[int, int]) -> None:
    """What travels between nodes of different sizes is the same page."""
    for node_id, size in zip(("prefill-0", "decode-0"), sizes, strict=True):
        assert len(ranks_of(cluster, node_id)) == size - 1
    clients = [make_client(index, 60) for index in range(8)]
    asyncio.run(stream_all(cluster.url, clients))
    for client in clients:
        client.check()
    pulled = [value for (name, _), value in cluster.metrics().items() if name == "baton_handoff_bytes_total"]
    assert sum(pulled) > 0
    cluster.eventually(cluster.at_rest, "all pages and rows are back")


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [
        (("--decode", "2", "--tp", "2"), signal.SIGKILL),
        (("--decode", "2", "--tp", "2"), signal.SIGSTOP),
        (("--decode", "2", "--dp", "2"), signal.SIGKILL),
    ],
    indirect=["cluster"],
)
def test_a_lost_rank_takes_its_node_down_and_streams_go_on_elsewhere(cluster: Cluster, fault: signal.Signals) -> None:
    """Killed, or frozen in the middle of a step: rank 0 ends, its router notices, the node comes back as a whole."""
    clients = [make_client(index, 300) for index in range(12)]
    node = cluster.node_pid("--node-id=decode-1")
    (victim,) = ranks_of(cluster, "decode-1")

    async def strike() -> None:
        await wait_until(lambda: all(client.num_tokens >= 8 for client in clients))
        victim.send_signal(fault)

    asyncio.run(stream_all(cluster.url, clients, strike))
    for client in clients:
        client.check()
    assert cluster.metrics()["baton_resumed_total", ""] >= 2
    cluster.eventually(lambda: not psutil.pid_exists(node), "rank 0 has ended")
    cluster.eventually(lambda: not victim.is_running(), "no rank is left behind")
    cluster.eventually(cluster.at_rest, "all pages and rows are back")
    assert cluster.pages_partition()


@pytest.mark.parametrize("cluster", [("--tp", "2")], indirect=True)
def test_no_rank_outlives_its_node(cluster: Cluster) -> None:
    """Rank 0 is killed, an idle rank is killed: the others end, frozen ones too; a new node has all its ranks."""
    old = cluster.node_pid("--node-id=decode-0")
    (frozen,) = ranks_of(cluster, "decode-0")
    frozen.suspend()
    os.kill(old, signal.SIGKILL)
    cluster.eventually(lambda: not frozen.is_running(), "the kernel ended it")
    cluster.eventually(lambda: _pid_or_0(cluster, "decode-0") not in (0, old), "the node is back")
    cluster.eventually(lambda: len(ranks_of(cluster, "decode-0")) == 1, "with its rank")
    (idle,) = ranks_of(cluster, "prefill-0")
    old = cluster.node_pid("--node-id=prefill-0")
    idle.kill()
    cluster.eventually(lambda: not psutil.pid_exists(old), "rank 0 noticed without having work for it")


def _pid_or_0(cluster: Cluster, node_id: str) -> int:
    try:
        return cluster.node_pid(f"--node-id={node_id}")
    except AssertionError:
        return 0
