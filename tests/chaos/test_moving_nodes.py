"""Nodes are killed, stopped, frozen, drained and turned around at random under many streams; every stream must equal
the reference, none may fail, and at the end nothing may be missing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.mixed_clients import Client, make_client, stream_all

NUM_STRIKES, NUM_KINDS, NUM_RESUMED = 20, 3, 5  # at least
NUM_USERS = 16
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
FLAGS = (
    *("--model", "hashlm", "--prefill", "2", "--decode", "2", "--heartbeat-s", "0.1", "--admin-without-key"),
    *("--node-silence-s", "1.5", "--silence-s", "1.5", "--drain-s", "0.3", "--max-restarts", "100"),
    *("--max-attempts", "8"),  # far more often than nodes die
)


class Storm:
    """One after another, what may happen to a node."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.struck: Counter[str] = Counter()

    async def blow(self) -> None:
        while not self.is_over():
            await asyncio.sleep(self.rng.uniform(0.2, 1.5))
            what = self.rng.choice(("kill", "terminate", "freeze", "restart", "role"))
            name = self.rng.choice(NAMES)
            if what in ("restart", "role"):
                await self._admin(what, name)
            elif await asyncio.to_thread(self._signal, what, name):
                self.struck[what] += 1

    def is_over(self) -> bool:
        if self.struck.total() < NUM_STRIKES or len(+self.struck) < NUM_KINDS:
            return False
        return self.cluster.metrics()["baton_resumed_total", ""] >= NUM_RESUMED

    async def _admin(self, what: str, name: str) -> None:
        """The router refuses what would leave nobody, and nodes that are not there."""
        body = {"node": name, "move_after_s": self.rng.choice((0.0, 1.0))}
        path = "/admin/drain" if what == "restart" else "/admin/role"
        body |= {"then": "restart"} if what == "restart" else {"role": self.rng.choice(("prefill", "decode"))}
        async with httpx.AsyncClient(timeout=HANG_GUARD_S) as http:
            answer = await http.post(self.cluster.url + path, json=body)
        assert answer.status_code in (202, 400, 404, 409), answer.text
        self.struck[what] += answer.status_code == 202

    def _signal(self, what: str, name: str) -> bool:
        """False: it is down just now."""
        for process in psutil.Process(self.cluster.process.pid).children(recursive=True):
            try:
                if f"--node-id={name}" not in process.cmdline():
                    continue
                if what == "freeze":
                    process.suspend()
                    time.sleep(self.rng.choice((0.3, 2.5)))
                    process.resume()
                else:
                    os.kill(process.pid, signal.SIGKILL if what == "kill" else signal.SIGTERM)
                return True
            except (psutil.Error, ProcessLookupError):
                return False
        return False


def was_turned_away(client: Client) -> bool:
    """It came when all four nodes were down: 503, and nothing had begun."""
    return '"no_nodes"' in client.error and not client.num_tokens


@pytest.mark.parametrize("spec", [pytest.param("none", marks=pytest.mark.long), "eagle"])
def test_streams_outlive_whatever_happens_to_nodes(tmp_path: Path, spec: str) -> None:
    clients: list[Client] = []
    rng = random.Random(spec)
    with baton_up(tmp_path / "up.log", *FLAGS, "--spec", spec) as cluster:
        storm = Storm(cluster, rng)

        async def user(number: int, wind: asyncio.Task[None]) -> None:
            for round_ in range(1000):
                index = number + NUM_USERS * round_
                client = make_client(index, rng.choice((60, 500, 900)), rng.choice((0, 0, 1500)))
                await stream_all(cluster.url, [client])
                if was_turned_away(client):
                    await asyncio.sleep(0.5)
                else:
                    clients.append(client)
                if wind.done():
                    return

        async def all_of_it() -> None:
            async with asyncio.TaskGroup() as tasks:
                wind = tasks.create_task(storm.blow())
                for number in range(NUM_USERS):
                    tasks.create_task(user(number, wind))

        asyncio.run(all_of_it())
        for client in clients:
            client.check()
        cluster.eventually(
            lambda: len(httpx.get(cluster.url + "/ready", timeout=HANG_GUARD_S).json()["nodes"]) == 4,
            "all nodes are back",
        )
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
        assert cluster.pages_partition()
