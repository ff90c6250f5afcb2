"""Nodes of `baton up` use each other's cores, as `baton admin status` tells people."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from shared.kernel.team import core_table
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.clusters.key_folders import write_key
from tests.support.machine.patience import HANG_GUARD_S

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to share")
FOLDER = core_table.SHARED_MEMORY / core_table.FOLDER.format(os.getuid())
PROMPT = "Tell a long story about a river."


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cores")
    flags = ("--heartbeat-s", "0.1", "--max-context", "2048", "--admin-key-file", str(folder / "key"))
    write_key(folder / "key", "a-key")
    with baton_up(folder / "up.log", *flags) as cluster:
        yield cluster
    assert not FOLDER.exists() or any(FOLDER.glob("slot-*")), "others share"


def cores(cluster: Cluster) -> dict[str, str]:
    headers = {"authorization": "Bearer a-key"}
    answer = httpx.get(cluster.url + "/admin/status", headers=headers, timeout=HANG_GUARD_S)
    return {node["node"]: node["cores"] for node in answer.json()["nodes"]}


async def stream(cluster: Cluster, num_tokens: int) -> None:
    """To its end, which is its length."""
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": num_tokens, "stream": True, "temperature": 0}
    url, body = cluster.url + "/v1/completions", body | {"ignore_eos": True}
    async with httpx.AsyncClient(timeout=HANG_GUARD_S) as client, client.stream("POST", url, json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"


async def while_streaming(cluster: Cluster, wanted: dict[str, str]) -> None:
    """Streams until the status says all that is wanted, at one time or another."""
    left = dict(wanted)
    deadline = asyncio.get_running_loop().time() + HANG_GUARD_S
    while left:
        assert asyncio.get_running_loop().time() < deadline, (left, cores(cluster))
        under_way = asyncio.create_task(stream(cluster, 200))
        while not under_way.done():
            told = await asyncio.to_thread(cores, cluster)
            left = {node: what for node, what in left.items() if what not in told.get(node, "")}
            await asyncio.sleep(0.02)
        await under_way


def at_rest(told: dict[str, str]) -> bool:
    """Whether both nodes are here, and each has its own core and nothing to say of others'."""
    return len(told) == 2 and not any(";" in what for what in told.values())


def test_a_lone_stream_decodes_on_the_prefill_nodes_core_too(cluster: Cluster) -> None:
    cluster.eventually(lambda: at_rest(cores(cluster)), "the warm-up's loans are over, and the router has heard so")
    own = cores(cluster)
    assert set(own) == {"prefill-0", "decode-0"}
    lent, borrowed = f"{own['prefill-0']} is lent to decode-0", f"borrowed: {own['prefill-0']}"
    asyncio.run(while_streaming(cluster, {"prefill-0": lent, "decode-0": borrowed}))
    cluster.eventually(lambda: cores(cluster) == own, "a rest, and every core is its node's again")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_borrower_that_dies_or_stops_leaves_the_other_its_core(cluster: Cluster, end: signal.Signals) -> None:
    """In the middle of a stream. The node that lent goes on; when the borrower is there again, so does the sharing."""

    async def strike() -> None:
        under_way = asyncio.create_task(stream(cluster, 1000))
        await asyncio.sleep(1.0)
        pid = cluster.node_pid("--node-id=decode-0")
        os.kill(pid, end)
        if end == signal.SIGSTOP:
            await asyncio.sleep(1.0)
            os.kill(pid, signal.SIGCONT)
        await under_way

    asyncio.run(strike())
    cluster.eventually(lambda: at_rest(cores(cluster)), "nobody holds what a dead one had")
    asyncio.run(while_streaming(cluster, {"decode-0": "borrowed"}))
