"""Two of three routers are killed under 32 streams: those of the third notice nothing, the others go on there."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.chaos.test_lost_streams import HEADERS, NUM_STREAMS, load_example
from tests.support.clusters.chaos_cluster import ChaosCluster, chaos_cluster

PATH = "/v1/completions"
TOKENS = 2000  # so that no stream is over, unread, when the last one has begun


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("three")
    with chaos_cluster(folder, nodes=("p0", "d0"), routers=3, api_key="sesame") as cluster:
        yield cluster


class Recorder:
    """Stands before the client's httpx: where each stream was asked for, by its thread."""

    def __init__(self, httpx: Any) -> None:
        self._httpx = httpx
        self.asked: dict[int, list[str]] = {}
        self.TransportError = httpx.TransportError

    def stream(self, method: str, url: str, **more: Any) -> Any:
        self.asked.setdefault(threading.get_ident(), []).append(url)
        return self._httpx.stream(method, url, **more)


def body_of(number: int) -> dict[str, Any]:
    body = {"prompt": f"stream {number} of many", "max_tokens": TOKENS, "ignore_eos": True, "seed": number}
    return body | {"return_token_ids": True}


def ids_of(chunks: Iterable[Any]) -> list[int]:
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


def test_two_of_three_routers_killed_cost_no_stream(cluster: ChaosCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load_example()
    recorder = Recorder(example.httpx)
    monkeypatch.setattr(example, "httpx", recorder)
    urls = [router.url + PATH for router in cluster.routers]
    begun, killed = threading.Barrier(NUM_STREAMS + 1), threading.Event()

    def one(number: int) -> tuple[list[int], list[str]]:
        """The stream's tokens, and the routers that it was asked of. It is read on when the routers are dead."""
        own = urls[number % 3 :] + urls[: number % 3]
        ids: list[int] = []
        for num_chunks, chunk in enumerate(example.stream(own, body_of(number), HEADERS), start=1):
            ids += ids_of([chunk])
            if num_chunks == 2:
                begun.wait()
                killed.wait()
        return ids, recorder.asked[threading.get_ident()]

    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(one, number) for number in range(NUM_STREAMS)]
        begun.wait()
        for doomed in cluster.routers[1:]:
            doomed.process.kill()
        for doomed in cluster.routers[1:]:
            doomed.process.wait()
        killed.set()
        told = [stream.result() for stream in streams]
    for number, (ids, asked) in enumerate(told):
        assert len(ids) == TOKENS
        survived = number % 3 == 0
        assert (asked == urls[:1]) is survived and asked[-1] == urls[0], (
            "only streams of killed routers are asked again"
        )
    lost = sum(number % 3 != 0 for number in range(NUM_STREAMS))
    assert cluster.routers[0].metric("baton_continued_streams_total") == lost
    for doomed in cluster.routers[1:]:
        doomed.stop()
    cluster.routers[1:] = []
    for number in (1, 2, 31):
        assert ids_of(example.stream(urls[0], body_of(number), HEADERS)) == told[number][0]
    cluster.check_whole()
