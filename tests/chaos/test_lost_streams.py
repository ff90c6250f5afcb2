"""Two routers behind one address, and one is killed under 32 streams: the client of examples/ gets every one whole."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos_cluster import ChaosCluster, chaos_cluster
from tests.support.front import front

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
    key = folder / "api.key"
    key.write_text("sesame\n")
    key.chmod(0o600)
    flags = ("--api-key-file", str(key))
    with chaos_cluster(folder, nodes=("p0", "d0"), routers=2, router_flags=flags) as cluster:
        yield cluster


def test_a_killed_router_costs_no_stream(cluster: ChaosCluster) -> None:
    stream, doomed = load_example().stream, cluster.routers[1]
    num_begun = threading.Semaphore(0)

    def one(url: str, number: int) -> list[int]:
        body: dict[str, object] = {"prompt": f"stream {number} of many", "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"return_token_ids": True, "seed": number} if number % 2 else {"return_token_ids": True}
        ids: list[int] = []
        answers, num_chunks = set(), 0
        for chunk in stream(f"{url}/v1/completions", body, HEADERS):
            answers.add(chunk["id"])
            num_chunks += 1
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
