"""Nodes die, freeze and fail under real clients; every stream must equal the one of a run that nothing happened to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.requests.suspects import CLEARED_AFTER
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.machine.patience import SILENCE_S
from tests.support.web.mixed_clients import Client, make_client, stream_all, wait_until

FLAGS = ("--model", "hashlm", "--heartbeat-s", "0.1", "--node-silence-s", str(SILENCE_S), "--silence-s", str(SILENCE_S))


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with baton_up(tmp_path / "up.log", *FLAGS, "--decode", "2", *getattr(request, "param", ())) as cluster:
        yield cluster


def check_all(clients: list[Client]) -> None:
    for client in clients:
        client.check()


def all_started(clients: list[Client], tokens: int = 8) -> bool:
    return all(client.num_tokens >= tokens for client in clients)


def resumed(cluster: Cluster) -> float:
    return cluster.metrics()["baton_resumed_total", ""]


@pytest.mark.parametrize(
    ("fault", "cluster"),
    [
        pytest.param(signal.SIGKILL, (), marks=pytest.mark.long),
        (signal.SIGKILL, ("--spec", "eagle")),
        (signal.SIGSTOP, ("--transport", "zmq")),
        pytest.param(signal.SIGTERM, ("--drain-s", "0.2"), marks=pytest.mark.long),
    ],
    indirect=["cluster"],
)
def test_one_of_two_decode_nodes_is_lost_under_32_streams(cluster: Cluster, fault: signal.Signals) -> None:
    """Killed, or frozen and back when nobody waits for it any more, or stopped with too little time to finish."""
    clients = [make_client(index, 300) for index in range(32)]
    victim = cluster.node_pid("--node-id=decode-1")

    async def strike() -> None:
        await wait_until(lambda: all_started(clients))
        os.kill(victim, fault)

    try:
        asyncio.run(stream_all(cluster.url, clients, strike))
        check_all(clients)
        assert resumed(cluster) >= 8
    finally:
        if fault == signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)  # a frozen process would outlive the test
    cluster.eventually(cluster.at_rest, "all pages and rows are back")
    assert cluster.pages_partition()


def test_the_prefill_node_is_killed_amid_long_prompts(cluster: Cluster) -> None:
    clients = [make_client(index, 40, prompt_len=3000) for index in range(16)]

    async def strike() -> None:
        await wait_until(lambda: any(client.num_tokens for client in clients))
        os.kill(cluster.node_pid("--node-id=prefill-0"), signal.SIGKILL)

    asyncio.run(stream_all(cluster.url, clients, strike))
    check_all(clients)
    assert resumed(cluster) >= 1


def test_with_all_nodes_gone_streams_wait_for_their_return(tmp_path: Path) -> None:
    clients = [make_client(index, 300) for index in range(8)]
    with baton_up(tmp_path / "up.log", *FLAGS) as cluster:

        async def strike() -> None:
            await wait_until(lambda: all_started(clients))
            for name in ("prefill-0", "decode-0"):
                os.kill(cluster.node_pid(f"--node-id={name}"), signal.SIGKILL)

        asyncio.run(stream_all(cluster.url, clients, strike))
    check_all(clients)


def test_a_request_whose_nodes_all_die_is_cut_off(cluster: Cluster) -> None:
    """Each time it gets further than before, so nothing says that it did it: it runs out of attempts."""
    poison = make_client(0, 3000)

    async def strike() -> None:
        for attempt in range(3):
            await wait_until(lambda attempt=attempt: resumed(cluster) == attempt)
            seen = poison.num_tokens
            await wait_until(lambda seen=seen: poison.num_tokens > seen + CLEARED_AFTER)
            while not (busy := busy_nodes(cluster)):
                await asyncio.sleep(0.02)
            os.kill(cluster.node_pid(f"--node-id={busy[0]}"), signal.SIGKILL)

    asyncio.run(stream_all(cluster.url, [poison], strike))
    assert "given up after 3 attempts" in poison.error and '"node_lost"' in poison.error
    wanted = poison.wanted()[0].ids
    assert poison.got[0].ids == wanted[: poison.num_tokens]
    cluster.eventually(cluster.pages_partition, "nodes are back")
    cluster.eventually(cluster.at_rest, "all pages and rows are back")


def busy_nodes(cluster: Cluster) -> list[str]:
    """Nodes that have rows running, by their newest heartbeat."""
    running = [labels for (name, labels), rows in cluster.metrics().items() if name == "baton_request_rows" and rows]
    return [labels.split('"')[1] for labels in running if 'state="running"' in labels]
