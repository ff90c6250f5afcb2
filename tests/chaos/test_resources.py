"""Disks, descriptors and patience run out. Streams that are open go on; what is refused is refused clearly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from shared.core import launcher
from tests.support.clusters.chaos_cluster import ChaosCluster, ready_nodes
from tests.support.clusters.cluster import ROOT
from tests.support.clusters.metrics_page import read_metrics
from tests.support.clusters.procs import few_descriptors
from tests.support.clusters.router_process import eventually
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.ports import free_port
from tests.support.web.sdk_clients import check_whole_or_broken, fresh_clients, run_clients, stream_all

NUM_ABORTING = 1000
ABORTING_AT_ONCE = 100
NUM_SLEEPERS = 4


def address_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def aborted(url: str) -> float:
    return read_metrics(url).get(("baton_requests_total", 'outcome="abort"'), 0.0)


def http_request(fields: dict[str, object]) -> bytes:
    body = json.dumps({"model": "hashlm", "stream": True, "ignore_eos": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


# ---- clients


def test_clients_that_do_not_read(cluster: ChaosCluster) -> None:
    """They are cut off; those beside them never notice."""
    before = aborted(cluster.url)
    with contextlib.ExitStack() as sleepers:
        for seed in range(NUM_SLEEPERS):
            sleeper = sleepers.enter_context(socket.socket())
            sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sleeper.connect(address_of(cluster.url))
            sleeper.sendall(http_request({"prompt": "x", "max_tokens": 4000, "logprobs": 20, "n": 4, "seed": seed}))
        clients = fresh_clients()
        run_clients(cluster.url, clients)
        for client in clients:
            client.check()
        eventually(lambda: aborted(cluster.url) == before + NUM_SLEEPERS)


async def abort_once(url: str, rng: random.Random, outcomes: Counter[str]) -> None:
    """Hangs up in some phase: half-way through its own request, at once, after some bytes, politely or not."""
    reader, writer = await asyncio.open_connection(*address_of(url))
    prompt = [rng.randrange(95) for _ in range(rng.choice([1, 40, 300, 900]))]
    request = http_request(
        {"prompt": prompt, "max_tokens": 300, "seed": rng.getrandbits(32), "n": rng.choice([1, 1, 3])}
    )
    phase = rng.choice(["request", "at once", "later", "first bytes", "many bytes"])
    try:
        writer.write(request[: rng.randrange(1, len(request))] if phase == "request" else request)
        await writer.drain()
        if phase == "later":
            await asyncio.sleep(rng.random() * 0.1)
        elif phase.endswith("bytes"):
            await asyncio.wait_for(reader.read(1 if phase == "first bytes" else 2000), HANG_GUARD_S)
        outcomes[phase] += 1
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def test_a_thousand_clients_that_hang_up(cluster: ChaosCluster) -> None:
    """And eight that stay, whose streams are the reference's."""
    outcomes: Counter[str] = Counter()
    clients = fresh_clients()

    async def one_after_another(index: int) -> None:
        rng = random.Random(index)
        for _ in range(NUM_ABORTING // ABORTING_AT_ONCE):
            await abort_once(cluster.url, rng, outcomes)

    async def meanwhile() -> None:
        await asyncio.gather(*(one_after_another(index) for index in range(ABORTING_AT_ONCE)))

    asyncio.run(stream_all(cluster.url, clients, meanwhile))
    assert sum(outcomes.values()) == NUM_ABORTING and min(outcomes.values()) > NUM_ABORTING // 10, outcomes
    for client in clients:
        client.check()


# ---- descriptors


def test_a_router_without_descriptors(cluster: ChaosCluster) -> None:
    """Open streams go on, its nodes stay, and as soon as there are descriptors again it serves again."""
    before, resumed = ready_nodes(cluster.url), cluster.resumed()
    early, late = fresh_clients(max_tokens=400), fresh_clients()

    async def starve() -> None:
        while not all(client.num_tokens for client in early):
            await asyncio.sleep(0.01)
        with few_descriptors(cluster.routers[0].process.pid, spare=4), contextlib.ExitStack() as idle:
            for _ in range(60):
                idle.enter_context(contextlib.closing(socket.create_connection(address_of(cluster.url))))
            await asyncio.sleep(1.0)

    asyncio.run(stream_all(cluster.url, early, starve))
    for client in early:
        client.check()
    run_clients(cluster.url, late)
    for client in late:
        client.check()
    assert ready_nodes(cluster.url) == before and cluster.resumed() == resumed


def test_requests_while_the_router_has_no_descriptors(cluster: ChaosCluster) -> None:
    """Each is served or refused by a closed connection; none hangs, and none gets a wrong token."""
    clients = fresh_clients()
    with few_descriptors(cluster.routers[0].process.pid, spare=3):
        run_clients(cluster.url, clients)
    for client in clients:
        check_whole_or_broken(client)


# ---- disks


def start_to_full_disk(*arguments: str) -> subprocess.Popen[bytes]:
    with Path("/dev/full").open("wb") as full:
        command = launcher.command("deploy.cli", *arguments, "--model", "hashlm", "--log-level", "debug")
        return subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=full)


@pytest.mark.parametrize("supervised", [True, False], ids=["baton_up", "daemons"])
def test_logs_on_a_full_disk(supervised: bool) -> None:
    """Nothing that it wants to say can be written: it serves, and ends as ever."""
    http, nodes = free_port(), f"tcp://127.0.0.1:{free_port()}"
    if supervised:
        processes = [start_to_full_disk("up", "--port", str(http))]
    else:
        processes = [start_to_full_disk("router", "--port", str(http), "--node-endpoint", nodes)]
        processes += [start_to_full_disk(role, "--router", nodes) for role in ("prefill", "decode")]
    url = f"http://127.0.0.1:{http}"
    try:
        eventually(lambda: len(ready_nodes(url)) == 2)
        clients = fresh_clients()
        run_clients(url, clients)
        for client in clients:
            client.check()
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        assert [process.wait(HANG_GUARD_S) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
