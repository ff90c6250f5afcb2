"""Two routers behind one address, and one is killed under 32 streams: clients that go on get every one whole."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from deploy.router_url import parse_url
from deploy.tools.traffic.client import Client
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.request_builder import RequestBuilder
from deploy.tools.traffic.runner import LoadRunner
from deploy.tools.traffic.target import Target, resolve
from deploy.tools.traffic.workloads.driver import Driver, Limits
from deploy.tools.traffic.workloads.workload import Session, Turn
from tests.support.clusters.chaos_cluster import ChaosCluster, chaos_cluster
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.wire.tcp_relay import front

NUM_STREAMS = 32
TOKENS = 400
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resuming_client.py"
HEADERS = {"Authorization": "Bearer sesame"}


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("resuming_client", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("lost")
    with chaos_cluster(folder, nodes=("p0", "d0"), routers=2, api_key="sesame") as cluster:
        yield cluster


def test_a_killed_router_costs_no_stream(cluster: ChaosCluster) -> None:
    stream, doomed = load_example().stream, cluster.routers[1]
    num_begun = threading.Semaphore(0)

    def one(url: str, number: int) -> list[int]:
        body: dict[str, object] = {"prompt": f"stream {number} of many", "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"return_token_ids": True, "seed": number} if number % 2 else {"return_token_ids": True}
        ids: list[int] = []
        answers = set()
        for num_chunks, chunk in enumerate(stream(f"{url}/v1/completions", body, HEADERS), start=1):
            answers.add(chunk["id"])
            for choice in chunk["choices"]:
                ids += choice["token_ids"]
            if num_chunks == 2:
                num_begun.release()
        assert len(answers) == 1
        return ids

    def kill() -> None:
        for _ in range(NUM_STREAMS):
            num_begun.acquire()
        doomed.process.kill()

    with front([router.url for router in cluster.routers]) as url, concurrent.futures.ThreadPoolExecutor(33) as pool:
        killing = pool.submit(kill)
        told = list(pool.map(lambda number: one(url, number), range(NUM_STREAMS)))
        killing.result()
        assert cluster.routers[0].metric("baton_continued_streams_total") >= 1
        wanted = list(pool.map(lambda number: one(cluster.url, number), range(1, NUM_STREAMS, 2)))
    assert [len(ids) for ids in told] == [TOKENS] * NUM_STREAMS
    assert told[1::2] == wanted  # those whose seed was given; of the others the routers' digests say the same
    doomed.stop()
    cluster.routers[1:] = []
    cluster.check_whole()


def test_a_load_that_resumes_loses_none(cluster: ChaosCluster) -> None:
    doomed = cluster.routers[1]

    async def play(url: str) -> list[RequestRecord]:
        address = parse_url(url)
        sessions = [Session((Turn(f"load {number}", TOKENS),)) for number in range(NUM_STREAMS)]
        driver = Driver(iter(sessions), iter([0.0] * NUM_STREAMS), 0, Limits())
        client = Client([resolve(address)], HANG_GUARD_S, resumes=True)
        builder = RequestBuilder(Target(address, "hashlm", True), "completions", "sesame")
        runner = LoadRunner(driver, client, builder, until_s=HANG_GUARD_S)

        async def kill() -> None:
            while len(runner.records) < NUM_STREAMS or not all(len(record.at) > 1 for record in runner.records):
                await asyncio.sleep(0.01)
            doomed.process.kill()

        records, _ = await asyncio.gather(runner.run(), kill())
        client.close()
        return records

    with front([router.url for router in cluster.routers]) as url:
        records = uvloop.run(play(url))
    assert [record.error for record in records] == [""] * NUM_STREAMS
    assert [len(record.ids) for record in records] == [TOKENS] * NUM_STREAMS
    assert any(record.num_resumed for record in records)
    doomed.stop()
    cluster.routers[1:] = []
    cluster.check_whole()
