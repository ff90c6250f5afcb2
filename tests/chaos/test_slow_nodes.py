"""A decode node's process gets a fifth of its time, as in a container above its CPU limit.

The router notices, and gives it less work than its peers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from tests.support.clusters.cluster import baton_up
from tests.support.machine.patience import HANG_GUARD_S

FLAGS = ("--model", "hashlm", "--prefill", "1", "--decode", "3", "--admin-without-key")
SLOW = "decode-0"
AWAKE_S, ASLEEP_S = 0.1, 0.4  # most steps are as fast as the peers'; a few contain a whole pause
NUM_USERS = 24
LOOK_S, NUM_LOOKS = 0.1, 20
BODY = {"model": "hashlm", "prompt": "x" * 60, "max_tokens": 300, "ignore_eos": True}


@contextlib.contextmanager
def throttled(process: psutil.Process) -> Iterator[None]:
    is_over = threading.Event()

    def cycle() -> None:
        while not is_over.wait(AWAKE_S):
            process.suspend()
            is_over.wait(ASLEEP_S)
            process.resume()

    thread = threading.Thread(target=cycle)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


async def gets_less_work(http: httpx.AsyncClient) -> None:
    """Wait until the slow node has been noticed, and has had less than half of a peer's sequences for a while."""
    looks: deque[dict[str, int]] = deque(maxlen=NUM_LOOKS)
    while True:
        await asyncio.sleep(LOOK_S)
        nodes = {node["node"]: node for node in (await http.get("/admin/status")).json()["nodes"]}
        if nodes[SLOW]["share"] == "whole":
            looks.clear()
        looks.append({name: node["open_sequences"] for name, node in nodes.items() if node["role"] == "decode"})
        sums = {name: sum(look[name] for look in looks) for name in looks[0]}
        if len(looks) == NUM_LOOKS and 2 * sums.pop(SLOW) < min(sums.values()):
            return


async def ask_until_it_gets_less(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=HANG_GUARD_S) as http, asyncio.timeout(HANG_GUARD_S):
        noticed = asyncio.create_task(gets_less_work(http))

        async def user() -> None:
            while not noticed.done():
                (await http.post("/v1/completions", json=BODY)).raise_for_status()

        await asyncio.gather(noticed, *(user() for _ in range(NUM_USERS)))


def test_a_throttled_decode_node_gets_less_work(tmp_path: Path) -> None:
    """The defect: the median of its steps was as short as its peers', and it got a third of all requests."""
    with (
        baton_up(tmp_path / "up.log", *FLAGS) as cluster,
        throttled(psutil.Process(cluster.node_pid(f"--node-id={SLOW}"))),
    ):
        asyncio.run(ask_until_it_gets_less(cluster.url))
