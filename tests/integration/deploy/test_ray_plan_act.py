"""`baton plan act --ray` on a real Ray cluster: a node comes under load and goes without it; no stream notices.

Then the command is killed while the later node serves, and the cluster's own rules give that back.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.core import launcher
from tests.support.clusters.metrics_page import nodes_of, read_metrics
from tests.support.clusters.ray_machines import BatonRay, all_run, environment
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.ports import free_port
from tests.support.web.mixed_clients import Client, under_load, wait_until

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]

USERS = 16  # twice what two decode nodes take
TOML = """
[ray]
prefill = 1
decode = 1
[scaling]
max_decode = 2
busy_rows = 1.0
busy_waiting = 1e6
up_after_s = 0.0
down_after_s = 1.0
settle_s = 0.0
[model]
model = "hashlm"
[memory]
kv_bytes = "2MiB"
max_running = 4
[node]
heartbeat_s = 0.1
[router]
admin_without_key = true
port = {port}
node_endpoint = "tcp://127.0.0.1:{node_port}"
"""


@pytest.fixture
def baton(tmp_path: Path) -> Iterator[BatonRay]:
    port = free_port(4)  # two routers, each with a port for nodes
    baton = BatonRay(tmp_path, TOML.format(port=port, node_port=port + 2))
    baton.up()
    yield baton
    baton.run("down")


@pytest.fixture
def url(baton: BatonRay) -> str:
    port = next(line for line in baton.file.read_text().splitlines() if line.startswith("port = "))
    return f"http://127.0.0.1:{port.removeprefix('port = ')}"


def start_act(baton: BatonRay, url: str, log: Path) -> subprocess.Popen[bytes]:
    flags = ("--window", "1", "--period", "0.2", "--slo", "tpot<60s", "--ray", str(baton.file))
    command = launcher.command("deploy.cli", "plan", "act", url, *flags)
    with log.open("wb") as sink:
        return subprocess.Popen(
            command, cwd=baton.home, env=environment(baton.home), stdout=sink, stderr=subprocess.STDOUT
        )


def test_ray_gives_and_takes_a_node_as_asked(baton: BatonRay, url: str, tmp_path: Path) -> None:
    log = tmp_path / "act.log"
    act = start_act(baton, url, log)

    def has_grown() -> bool:
        assert act.poll() is None, log.read_text()
        return "decode-1" in nodes_of(read_metrics(url))

    def shrinks() -> None:
        baton.until(lambda rows: "decode-1" not in rows and all_run(rows), "decode-1 has left")

    clients: list[Client] = []
    try:
        clients += asyncio.run(under_load(url, USERS, has_grown))
        assert "asks Ray for one more node, decode" in log.read_text()
        shrinks()
        assert "gives decode-1 back to Ray" in log.read_text()
        clients += asyncio.run(under_load(url, USERS, has_grown))
        act.kill()
        act.wait(HANG_GUARD_S)
        said = log.read_text()
        shrinks()
        assert said.count("gives decode-1 back") == 1, f"the second time it was killed before: {said}"
        act = start_act(baton, url, log)
        asyncio.run(wait_until(lambda: "; looking" in log.read_text()))
        act.terminate()
        assert act.wait(HANG_GUARD_S) == 0, log.read_text()
    finally:
        act.kill()
        act.wait(HANG_GUARD_S)
    for client in clients:
        client.check()
