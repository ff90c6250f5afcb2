"""`baton plan act` on a cluster that serves: where decode nodes are full prefill nodes change over; no stream notices.

The command is killed once on its way. What it had ordered happens, and the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.core import launcher
from tests.support.clusters.cluster import ROOT, Cluster, baton_up
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.mixed_clients import under_load

USERS = 24  # four times what one node takes
FLAGS = ("--model", "hashlm", "--heartbeat-s", "0.1", "--prefill", "3", "--max-running", "4", "--admin-without-key")
ACT = ("plan", "act", "--window", "2", "--period", "0.2", "--slo", "tpot<60s")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with baton_up(tmp_path / "up.log", *FLAGS) as cluster:
        yield cluster


def roles(cluster: Cluster) -> list[str]:
    nodes = httpx.get(cluster.url + "/admin/status", timeout=HANG_GUARD_S).json()["nodes"]
    return sorted(node["role"] for node in nodes if node["state"] == "ready")


def start_act(cluster: Cluster, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as sink:
        return subprocess.Popen(
            launcher.command("deploy.cli", *ACT, cluster.url), cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT
        )


@pytest.mark.long
def test_full_decode_nodes_get_help_though_the_command_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    processes = [start_act(cluster, logs[0])]

    def has_ordered() -> bool:
        assert processes[0].poll() is None, logs[0].read_text()
        return " becomes a decode node" in logs[0].read_text()

    def has_two() -> bool:
        assert processes[-1].poll() is None, logs[-1].read_text()
        is_looking = "decode nodes;" in logs[-1].read_text()
        return is_looking and len(roles(cluster)) == 4 and roles(cluster).count("decode") >= 2

    try:
        clients = asyncio.run(under_load(cluster.url, USERS, has_ordered))
        processes[0].kill()
        processes.append(start_act(cluster, logs[1]))
        clients += asyncio.run(under_load(cluster.url, USERS, has_two))
        processes[1].terminate()
        assert processes[1].wait(HANG_GUARD_S) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert roles(cluster).count("prefill") >= 1
    for client in clients:
        client.check()
    cluster.eventually(cluster.at_rest, "all pages and rows are back")


def test_a_role_s_last_node_stays_for_whom_asks_that(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=HANG_GUARD_S) as http:
        answer = http.post("/admin/role", json={"node": "decode-0", "role": "prefill", "least": 1})
    assert answer.status_code == 409 and "decode needs 1 other nodes" in answer.text
    assert roles(cluster) == ["decode", "prefill", "prefill", "prefill"]
