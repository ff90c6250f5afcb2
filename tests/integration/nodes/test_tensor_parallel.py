"""Nodes of several ranks as real processes: streams are the oracle's, and a lost rank ends its whole node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.core import launcher
from tests.support.clusters.cluster import ROOT, Cluster, baton_up
from tests.support.clusters.metrics_page import nodes_of, total
from tests.support.gpus.virtual_rank import ENDS_AT, LOAD
from tests.support.machine.patience import HANG_GUARD_S, SILENCE_S
from tests.support.web.mixed_clients import make_client, stream_all, wait_until

FLAGS = ("--model", "hashlm", "--heartbeat-s", "0.1", "--node-silence-s", str(SILENCE_S), "--silence-s", str(SILENCE_S))
NOBODY = "tcp://127.0.0.1:7001"  # nobody is there, and nobody is dialled for long


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
        pytest.param(("--decode-tp", "4", "--transport", "zmq"), (1, 4), marks=pytest.mark.long),
        (("--tp", "4", "--decode-tp", "1", "--spec", "eagle", "--layer-parts", "2"), (4, 1)),
        (("--tp", "2", "--decode-tp", "4", "--spec", "ngram", "--transport", "gloo"), (2, 4)),
        pytest.param(("--dp", "3"), (1, 3), marks=pytest.mark.long),
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
    assert total(cluster.metrics(), "baton_handoff_bytes_total") > 0
    cluster.eventually(cluster.at_rest, "all pages and rows are back")


LOST = [
    ("decode", "zmq", "--tp", signal.SIGSTOP),
    ("decode", "auto", "--dp", signal.SIGKILL),
    ("prefill", "gloo", "--tp", signal.SIGKILL),
]
ALSO_LOST = [
    (role, transport, "--tp", fault)
    for role in ("decode", "prefill")
    for transport in ("shm", "zmq", "gloo")
    for fault in (signal.SIGKILL, signal.SIGSTOP)
    if (role, transport, "--tp", fault) not in LOST
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lost" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-ranks")
        cases = [(case, start_of(*case)) for case in (LOST + ALSO_LOST if every else LOST)]
        ids = ["-".join((*case[:3], case[3].name)) for case, _ in cases]
        metafunc.parametrize(("lost", "cluster"), cases, indirect=["cluster"], ids=ids)


def start_of(role: str, transport: str, by: str, fault: signal.Signals) -> tuple[str, ...]:
    """Two nodes of the role; prompts of many steps, so that they can be met half computed."""
    return (f"--{role}", "2", by, "2", "--transport", transport, "--chunk-size", "64")


def test_a_lost_rank_ends_its_node_and_streams_move_elsewhere(
    cluster: Cluster, lost: tuple[str, str, str, signal.Signals]
) -> None:
    """Killed, or frozen in the middle of a step: rank 0 ends, its router notices, the node comes back as a whole."""
    role, _, _, fault = lost
    clients = [make_client(index, 300, 0 if role == "decode" else 1500) for index in range(12)]
    node = cluster.node_pid(f"--node-id={role}-1")
    (victim,) = ranks_of(cluster, f"{role}-1")

    def struck_now() -> bool:
        """While all are decoded, or while most are prefilled."""
        begun = [client for client in clients if client.num_tokens >= (8 if role == "decode" else 1)]
        return len(begun) >= (len(clients) if role == "decode" else 2)

    async def strike() -> None:
        await wait_until(struck_now)
        victim.send_signal(fault)

    asyncio.run(stream_all(cluster.url, clients, strike))
    for client in clients:
        client.check()
    assert cluster.metrics()["baton_resumed_total", ""] >= 2
    cluster.eventually(lambda: not psutil.pid_exists(node), "rank 0 has ended")
    cluster.eventually(lambda: not victim.is_running(), "no rank is left behind")
    cluster.eventually(lambda: _pid_or_0(cluster, f"{role}-1") not in (0, node), "the node is back")
    cluster.eventually(lambda: len(nodes_of(cluster.metrics())) == 3, "and its router knows it")
    again = [make_client(index, 40) for index in range(12, 20)]
    asyncio.run(stream_all(cluster.url, again))
    for client in again:
        client.check()
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


def test_all_ranks_refuse_a_model_that_can_not_be_shared_out() -> None:
    """By rank 0's words alone, and nobody stays behind."""
    command = launcher.command("deploy.cli", "decode", "--model", "hashlm", "--tp", "3", "--node-id", "refused-0")
    done = subprocess.run(
        (*command, "--router", NOBODY), cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--tp 3: hashlm has 4 lanes, which 3 does not divide")
    assert "Traceback" not in done.stderr
    assert not [one for one in psutil.process_iter(["cmdline"]) if "--of=refused-0" in (one.info["cmdline"] or ())]


UNJOINED = """
import sys
from deploy.cli import main
from shared.core import launcher

command = launcher.command
launcher.command = lambda module, *args: command("tests.support.gpus.virtual_rank", {first!r}, *args)
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_that_ends_before_it_joins_ends_its_node(tmp_path: Path) -> None:
    """Rank 0 would wait for it at the rendezvous, for minutes."""
    code = UNJOINED.format(first=f"{ENDS_AT}{LOAD},{tmp_path / 'holder'}")
    node = ("decode", "--model", "hashlm", "--tp", "2", "--node-id", "unjoined-0", "--router", NOBODY)
    said = tmp_path / "said.txt"
    with said.open("w") as sink:  # a pipe would stay open in the holder
        done = subprocess.run(
            (sys.executable, "-c", code, *node), cwd=ROOT, stdin=subprocess.DEVNULL, stderr=sink, timeout=HANG_GUARD_S
        )
    os.kill(int((tmp_path / "holder").read_text()), signal.SIGKILL)
    assert done.returncode == 1
    assert said.read_text().splitlines()[-1].endswith('error="rank 1 ended with status -9"')


def _pid_or_0(cluster: Cluster, node_id: str) -> int:
    try:
        return cluster.node_pid(f"--node-id={node_id}")
    except AssertionError:
        return 0
