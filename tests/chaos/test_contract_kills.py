"""The SDKs' clients that continue, against real routers and nodes that are killed."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai
import pytest

from shared.core.sampling_params import SamplingParams
from stream_conformance.resume import resuming
from tests.support.clusters.chaos_cluster import ChaosCluster, chaos_cluster, router_process
from tests.support.oracles.hashlm_reference import reference_stream

KEY = "sesame"
NODES = ("p0", "d0", "d1")
NUM_KILLS = 5  # of each seed: a hundred in all, most of them with --long
NUM_READERS = 6
NUM_EVENTS = 3  # that each reader gets between two kills
TOKENS = 1500  # so that streams are under way when something is killed
PROMPT = "stream %d of many"
Report = Callable[[], None]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ChaosCluster]:
    with chaos_cluster(tmp_path, nodes=NODES, routers=2, api_key=KEY) as cluster:
        yield cluster


def begin_again(cluster: ChaosCluster, number: int, folder: Path) -> None:
    """Kill a router, and start one with the same name and addresses. It knows nothing of the streams."""
    doomed = cluster.routers[number]
    doomed.process.send_signal(signal.SIGKILL)
    doomed.stop()
    flags = ("--node-endpoint", doomed.nodes, "--port", doomed.url.rpartition(":")[2])
    flags += ("--api-key-file", str(folder / "api.key"))
    cluster.routers[number] = router_process(f"router{number}", *flags, api_key=KEY)


def read_openai(urls: list[str], number: int, report: Report) -> list[int]:
    """Return the token ids of one stream."""
    ids: list[int] = []
    with resuming(openai.OpenAI(base_url=f"{urls[0]}/v1", api_key=KEY, max_retries=50), *urls[1:]) as client:
        body = {"return_token_ids": True, "ignore_eos": True}
        for chunk in client.completions.create(
            model="hashlm", prompt=PROMPT % number, max_tokens=TOKENS, seed=number, stream=True, extra_body=body
        ):
            for choice in chunk.choices:
                ids += getattr(choice, "token_ids", None) or []
            report()
    return ids


def read_anthropic(urls: list[str], number: int, report: Report) -> str:
    """Return the text of one stream."""
    text = ""
    with resuming(anthropic.Anthropic(base_url=urls[0], api_key=KEY, max_retries=50), *urls[1:]) as client:
        message = {"role": "user", "content": PROMPT % number}
        for event in client.messages.create(
            model="hashlm",
            messages=[message],  # type: ignore[list-item]
            max_tokens=TOKENS,
            stream=True,
            extra_body={"temperature": 0.0},
        ):
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                text += event.delta.text
            report()
    return text


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))])
def test_kills_of_routers_and_nodes_cost_no_token(cluster: ChaosCluster, tmp_path: Path, seed: int) -> None:
    drawn, urls, ended = random.Random(seed), [router.url for router in cluster.routers], threading.Event()
    counts = [0] * NUM_READERS

    def read_on(number: int) -> list[object]:
        """Return all that the streams said. Half of the readers begin at each router."""

        def report() -> None:
            counts[number] += 1

        read = read_openai if number % 2 else read_anthropic
        own, told = urls if number % 4 < 2 else urls[::-1], []
        while not ended.is_set():
            told.append(read(own, number, report))
        return told

    def all_read(before: list[int]) -> bool:
        for reader in readers:
            if reader.done():
                reader.result()  # it raises: a reader does not end by itself
        return all(now >= then + NUM_EVENTS for now, then in zip(counts, before, strict=True))

    with ThreadPoolExecutor(NUM_READERS) as pool:
        readers = [pool.submit(read_on, number) for number in range(NUM_READERS)]
        try:
            for _ in range(NUM_KILLS):
                before = list(counts)
                cluster.eventually(lambda before=before: all_read(before), "all streams are under way")
                victim = drawn.choice((0, 1, *NODES))
                if isinstance(victim, int):
                    begin_again(cluster, victim, tmp_path)
                else:
                    cluster.kill(victim)
                    cluster.nodes[victim].process.wait()
                    cluster.restart_dead()
                cluster.wait_ready()
        finally:
            ended.set()
        told = [reader.result() for reader in readers]
    print(f"{NUM_KILLS} kills, {sum(map(len, told))} streams, {cluster.resumed():.0f} resumed")
    for number, streams in enumerate(told):
        if number % 2:
            prompt = [ord(char) - 32 for char in PROMPT % number]
            wanted: object = reference_stream(prompt, SamplingParams(TOKENS), number, TOKENS)
        else:
            wanted = read_anthropic(urls, number, lambda: None)
        assert streams == [wanted] * len(streams), f"reader {number}"
    cluster.check_whole()
