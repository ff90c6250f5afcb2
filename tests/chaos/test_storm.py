"""Thousands of random requests through real processes, with hang-ups in every phase; then nothing may be missing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from shared.core.sampling_params import SamplingParams
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.oracles.hashlm_reference import reference_stream

NUM_REQUESTS = 2000
NUM_CLIENTS = 24


async def one_client(cluster: Cluster, rng: random.Random, count: int, outcomes: Counter[str]) -> None:
    async with httpx.AsyncClient(timeout=HANG_GUARD_S) as client:
        for _ in range(count):
            outcomes[await one_request(client, cluster, rng)] += 1


async def one_request(client: httpx.AsyncClient, cluster: Cluster, rng: random.Random) -> str:
    prompt = [rng.randrange(95) for _ in range(rng.choice([1, 5, 40, 90, 300]))]
    max_tokens = rng.choice([1, 2, 10, 40])
    seed = rng.getrandbits(40)
    body = {
        "model": "hashlm",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "n": rng.choice([1, 1, 1, 2]),
    }
    patience_s = rng.choice([None, None, 0.0, 0.002, 0.01, 0.05])
    reading = read_ids(client, cluster, body)
    if patience_s is None:
        ids = await reading
        assert ids == reference_stream(prompt, SamplingParams(max_tokens), seed, max_tokens)
        return "complete"
    try:
        await asyncio.wait_for(reading, patience_s)
        return "quick"
    except TimeoutError:
        return "hung up"


async def read_ids(client: httpx.AsyncClient, cluster: Cluster, body: dict[str, object]) -> list[int]:
    """Token ids of choice 0."""
    ids: list[int] = []
    async with client.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = httpx.Response(200, text=line[6:]).json()
                ids.extend(i for c in chunk["choices"] if c["index"] == 0 for i in c.get("token_ids") or [])
    return ids


@pytest.mark.rule("I7")
def test_storm_of_requests_and_hang_ups_leaks_nothing(tmp_path: Path) -> None:
    flags = ("--model", "hashlm", "--heartbeat-s", "0.1", "--max-running", "8", "--kv-bytes", "400KiB")
    with baton_up(tmp_path / "up.log", *flags, "--max-context", "512") as cluster:
        outcomes: Counter[str] = Counter()

        async def storm() -> None:
            share = NUM_REQUESTS // NUM_CLIENTS + 1
            await asyncio.gather(*(one_client(cluster, random.Random(i), share, outcomes) for i in range(NUM_CLIENTS)))

        asyncio.run(storm())
        print(dict(outcomes))
        assert outcomes["hung up"] > NUM_REQUESTS // 5
        assert outcomes["complete"] > NUM_REQUESTS // 5
        cluster.eventually(cluster.at_rest, "every page and row is back")
        assert cluster.pages_partition()
        assert cluster.stop() == 0
