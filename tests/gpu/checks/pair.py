"""A prefill node and two decode nodes, processes of one GPU, behind a router: one decode node is killed in the middle
of all streams, and each stream is that of a pair on the CPU."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path

import httpx
import tokenizers

from tests.gpu.place import NotHere, Place
from tests.support.cluster import Cluster, baton_up
from tests.support.patience import HANG_GUARD_S, SILENCE_S
from tests.support.tiny_llama import VOCAB, write_tiny_llama

STREAMS, TINY_STREAMS = 8, 4  # rounding may turn one draw in some hundred thousand: so not too many
TOKENS, TINY_TOKENS = 120, 300  # the last stream must have begun before the first ends
KILLED_AFTER = 8  # tokens of each stream
FLAGS = (
    "--dtype", "float32", "--kv-bytes", "64MiB", "--heartbeat-s", "0.1", "--node-silence-s", str(SILENCE_S),
    "--silence-s", str(SILENCE_S), "--decode", "2", "--policy", "round_robin",  # so that either has streams
)  # fmt: skip
Streams = list[list[int]]
Strike = Callable[[Cluster, Streams], Coroutine[None, None, None]]


def pair(place: Place, transport: str) -> dict[str, object]:
    """On the virtual GPU, whose memory is one process's, nodes are the CPU's."""
    if place.tiny and transport == "cuda_ipc":
        raise NotHere("the memory of a virtual GPU is its process's own")
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_llama(Path(name) / "model")
        write_tokenizer(folder)
        flags = ("--model", str(folder), *FLAGS)
        wanted = run(Path(name), (*flags, "--device", "cpu"), leave_alone, place.tiny)[0]
        device = "cpu" if place.tiny else "cuda"
        got, resumed = run(Path(name), (*flags, "--device", device, "--transport", transport), kill_one, place.tiny)
    assert got == wanted, f"{sum(a != b for a, b in zip(got, wanted, strict=True))} of {len(wanted)} streams differ"
    assert resumed > 0, "no stream was the killed node's"
    return {"streams": len(got), "tokens": sum(map(len, got)), "resumed": resumed}


def run(folder: Path, flags: tuple[str, ...], strike: Strike, tiny: bool) -> tuple[Streams, int]:
    """(token ids of all streams, how many requests went on elsewhere)."""
    with baton_up(folder / "up.log", *flags) as cluster:
        got = asyncio.run(stream_all(cluster, strike, tiny))
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
        return got, int(cluster.metrics()["baton_resumed_total", ""])


async def stream_all(cluster: Cluster, strike: Strike, tiny: bool) -> Streams:
    count, tokens = (TINY_STREAMS, TINY_TOKENS) if tiny else (STREAMS, TOKENS)
    streams: Streams = [[] for _ in range(count)]
    async with httpx.AsyncClient(timeout=HANG_GUARD_S, limits=httpx.Limits(max_connections=None)) as client:
        asks = [ask(client, cluster.url, number, tokens, stream) for number, stream in enumerate(streams)]
        await asyncio.gather(*asks, strike(cluster, streams))
    assert all(len(stream) == tokens for stream in streams), [len(stream) for stream in streams]
    return streams


async def ask(client: httpx.AsyncClient, url: str, number: int, tokens: int, into: list[int]) -> None:
    """One request, sampled, whose token ids are written down as they come."""
    prompt = [2 + (number * 7 + place) % (VOCAB - 2) for place in range(3 + 5 * number)]
    body = {
        "model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "seed": number,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                told = json.loads(line.removeprefix("data: "))
                assert "error" not in told, told
                into.extend(one for choice in told["choices"] for one in choice.get("token_ids") or ())


async def leave_alone(cluster: Cluster, streams: Streams) -> None:
    """Nothing happens."""


async def kill_one(cluster: Cluster, streams: Streams) -> None:
    while not all(len(stream) >= KILLED_AFTER for stream in streams):
        await asyncio.sleep(0.01)
    os.kill(cluster.node_pid("--node-id=decode-1"), signal.SIGKILL)


def write_tokenizer(folder: Path) -> None:
    """A word for each id."""
    words = {f"w{number}": number for number in range(VOCAB)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
