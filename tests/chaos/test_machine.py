"""The machine lets down whoever runs on it: disks, clocks, descriptors, files. Requests are served on, or a node ends
with one sentence."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from shared.core import launcher
from shared.core.sampling_params import SamplingParams
from tests.support.clusters.chaos_cluster import ready_nodes
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.clusters.procs import NodeProcess, RouterStub
from tests.support.cores.core_rig import Job
from tests.support.machine import stepped_clock
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.library_families import save
from tests.support.web.mixed_clients import Client
from tests.support.web.sdk_clients import check_whole_or_broken, fresh_clients, run_clients, stream_all

HASHLM = ("--model", "hashlm", "--kv-bytes", "4MiB")
HOUR_S = 3600.0
FEW_DESCRIPTORS = 256
NUM_ROUNDS = 40  # of clients, which are more than the descriptors
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
os.execv(sys.argv[1], sys.argv[1:])
"""


def serve_while(cluster: Cluster, happen: Callable[[], object]) -> None:
    """`happen` is called when all clients have tokens. Each gets its whole answer."""
    clients = fresh_clients(max_tokens=300)

    async def meanwhile() -> None:
        while not all(client.num_tokens for client in clients):
            await asyncio.sleep(0.02)
        happen()

    asyncio.run(stream_all(cluster.url, clients, meanwhile))
    check_all(clients)


def is_served_again(cluster: Cluster) -> bool:
    return "router was killed by SIGKILL" in cluster.log_path.read_text() and len(ready_nodes(cluster.url)) == 2


def check_all(clients: list[Client]) -> None:
    for client in clients:
        client.check()


def environment(folder: Path, **more: str) -> Mapping[str, str]:
    (folder / "home").mkdir()
    return {**os.environ, "HOME": str(folder / "home"), **more}


def test_caches_and_home_are_removed_while_it_serves(tmp_path: Path) -> None:
    """Afterwards files are in their places, so that nothing can be written there."""
    kernels = tmp_path / "kernels"
    env = environment(tmp_path, NUMBA_CACHE_DIR=str(kernels))

    def remove() -> None:
        for folder in (tmp_path / "home", kernels):
            shutil.rmtree(folder)
            folder.touch()

    with baton_up(tmp_path / "up.log", *HASHLM, env=env) as cluster:
        serve_while(cluster, remove)
        serve_while(cluster, lambda: os.kill(cluster.node_pid("decode"), signal.SIGKILL))
        assert cluster.stop() == 0
    assert "Traceback" not in cluster.log_path.read_text()


def test_the_time_steps_by_an_hour(tmp_path: Path) -> None:
    """On, and two hours back. A process that starts then has an earlier epoch than the one before it."""
    clock = tmp_path / "clock"
    env = environment(tmp_path, **stepped_clock.environment(clock))
    with baton_up(tmp_path / "up.log", *HASHLM, env=env) as cluster:
        serve_while(cluster, lambda: stepped_clock.step(clock, HOUR_S))
        serve_while(cluster, lambda: stepped_clock.step(clock, -HOUR_S))
        for role in ("decode", "prefill"):
            serve_while(cluster, lambda role=role: os.kill(cluster.node_pid(role), signal.SIGKILL))
        cluster.eventually(lambda: len(ready_nodes(cluster.url)) == 2, "both nodes are back")
        os.kill(cluster.node_pid("router"), signal.SIGKILL)
        cluster.eventually(lambda: is_served_again(cluster), "a new router serves both")
        serve_while(cluster, lambda: None)
        assert cluster.stop() == 0


def test_256_descriptors_for_320_clients(tmp_path: Path) -> None:
    """Each client gets its answer, or its connection is closed or refused in words."""
    limited = [sys.executable, "-c", LIMITED.format(FEW_DESCRIPTORS), *launcher.command("deploy.cli")]
    with baton_up(tmp_path / "up.log", *HASHLM, env=environment(tmp_path), program=limited) as cluster:
        clients = [client for _ in range(NUM_ROUNDS) for client in fresh_clients(max_tokens=20)]
        run_clients(cluster.url, clients)
        for client in clients:
            check_whole_or_broken(client)
        assert sum(not client.error for client in clients) > FEW_DESCRIPTORS // 4
        late = fresh_clients()
        run_clients(cluster.url, late)
        check_all(late)
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
        assert cluster.stop() == 0


@pytest.fixture
def router() -> Iterator[RouterStub]:
    stub = RouterStub()
    yield stub
    stub.close()


@pytest.mark.parametrize("cut", [False, True], ids=["written", "cut off"])
def test_weights_change_under_a_node(router: RouterStub, tmp_path: Path, cut: bool) -> None:
    """The library computes with the mapped pages of the file."""
    save("gpt_oss", tmp_path / "tiny")
    weights = tmp_path / "tiny" / "model.safetensors"
    flags = ("--model", str(tmp_path / "tiny"), "--dtype", "float32", "--kv-bytes", "4MiB", "--device", "cpu")
    node = NodeProcess("prefill", "p0", router, tmp_path, *flags)
    try:
        router.until(lambda: "p0" in router.hellos, "Hello")
        key = router.generate("p0", Job(1, tuple(range(5, 25)), SamplingParams(temperature=0.0, max_tokens=8), 1))
        router.wait_ends([key])
        if cut:
            os.truncate(weights, 1000)
        else:
            weights.write_bytes(weights.read_bytes())
        assert node.process.wait(HANG_GUARD_S) == 1
        assert "model.safetensors was written while this node used it" in node.log and "Traceback" not in node.log
    finally:
        node.close()
