"""A prefill node and two decode nodes, processes of one GPU, behind a router: one decode node is killed in the middle
of all streams, and each stream is that of a pair on the CPU. And the same streams on two GPUs: of two nodes, and of
one node over both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import httpx
import tokenizers

from tests.gpu.place import Place
from tests.gpu.plan import NotHere
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.machine.patience import HANG_GUARD_S, SILENCE_S
from tests.support.models.tiny_llama import VOCAB, write_tiny_llama

STREAMS, TINY_STREAMS = 8, 4  # rounding may turn one draw in some hundred thousand: so not too many
TOKENS, TINY_TOKENS = 120, 1500  # the last stream must have begun before the first ends
SHORTEST = 40  # prompt: a shorter one would be computed where it is decoded, without a hand-off
KILLED_AFTER = 8  # tokens of each stream
FLAGS = (
    "--dtype", "float32", "--kv-bytes", "64MiB", "--heartbeat-s", "0.1", "--node-silence-s", str(SILENCE_S),
    "--silence-s", str(SILENCE_S), "--policy", "round_robin",  # so that either has streams
)  # fmt: skip
Streams = list[list[int]]
Strike = Callable[[Cluster, Streams, int], Coroutine[None, None, None]]  # the int: tokens of a whole stream


def pair(place: Place, transport: str) -> dict[str, object]:
    """On the virtual GPU, whose memory is one process's, nodes are the CPU's."""
    if place.tiny and transport == "cuda_ipc":
        raise NotHere("the memory of a virtual GPU is its process's own")
    with folder_and_model() as (logs, model):
        flags = ("--model", str(model), *FLAGS, "--prefill", "1", "--decode", "2")
        wanted = run(logs, (*flags, "--device", "cpu"), None, place.tiny)[0]
        got, resumed = run(
            logs, (*flags, *on_gpus(place.tiny, "0,0,0"), "--transport", transport), kill_one, place.tiny
        )
        assert f"transport={transport}" in (logs / "up.log").read_text(), "no hand-off took it"
    check_equal(got, wanted)
    assert resumed > 0, "no stream was the killed node's"
    return {"streams": len(got), "tokens": sum(map(len, got)), "resumed": resumed}


def check_equal(got: Streams, wanted: Streams) -> None:
    assert got == wanted, f"{sum(a != b for a, b in zip(got, wanted, strict=True))} of {len(wanted)} streams differ"


@contextlib.contextmanager
def folder_and_model() -> Iterator[tuple[Path, Path]]:
    """A folder for logs, and a tiny model in it."""
    with tempfile.TemporaryDirectory() as name:
        model = write_tiny_llama(Path(name) / "model", context=2048)
        write_tokenizer(model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))  # transformers asks for it
        yield Path(name), model


def run(folder: Path, flags: tuple[str, ...], strike: Strike | None, tiny: bool) -> tuple[Streams, int]:
    """(token ids of all streams, how many requests went on elsewhere)."""
    with baton_up(folder / "up.log", *flags) as cluster:
        got = asyncio.run(stream_all(cluster.url, tiny, cluster, strike))
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
        return got, int(cluster.metrics()["baton_resumed_total", ""])


def across(place: Place, transport: str) -> dict[str, object]:
    """A prefill node on one GPU, a decode node on another: the streams of a pair on the CPU. On the virtual GPU both
    compute on the CPU, and take a transport of the CPU's."""
    if not place.tiny and place.gpu.device_count() < 2:
        raise NotHere("this machine has one GPU")
    on = {"cuda_ipc": "shm", "nccl": "gloo"}[transport] if place.tiny else transport
    with folder_and_model() as (logs, model):
        flags = ("--model", str(model), *FLAGS, "--prefill", "1", "--decode", "1", "--trust-network")
        wanted = run(logs, (*flags, "--device", "cpu"), None, place.tiny)[0]
        got = run(logs, (*flags, *on_gpus(place.tiny, "0,1"), "--transport", on), None, place.tiny)[0]
        assert f"transport={on}" in (logs / "up.log").read_text(), "no hand-off took it"
    check_equal(got, wanted)
    return {"streams": len(got), "tokens": sum(map(len, got))}


def divided(place: Place) -> dict[str, object]:
    """One node over two GPUs, whose two processes add by NCCL: the streams of one GPU. On the virtual GPU both nodes
    compute on the CPU, and add by gloo."""
    if not place.tiny and place.gpu.device_count() < 2:
        raise NotHere("this machine has one GPU")
    with folder_and_model() as (logs, model):
        alone = ("--model", str(model), "--model-library", "transformers", *FLAGS, "--prefill", "0", "--decode", "1")
        wanted = run(logs, (*alone, *on_gpus(place.tiny, "0")), None, place.tiny)[0]
        got = run(logs, (*alone, "--tp", "2", *on_gpus(place.tiny, "0,1")), None, place.tiny)[0]
        assert "ranks=2" in (logs / "up.log").read_text(), "nothing was divided"
    check_equal(got, wanted)
    return {"streams": len(got), "tokens": sum(map(len, got))}


def on_gpus(tiny: bool, numbers: str) -> tuple[str, ...]:
    """Flags: a GPU for each node. Nodes of the virtual GPU are the CPU's."""
    return ("--device", "cpu") if tiny else ("--device", "cuda", "--devices", numbers)


async def stream_all(url: str, tiny: bool, cluster: Cluster | None = None, strike: Strike | None = None) -> Streams:
    count, tokens = (TINY_STREAMS, TINY_TOKENS) if tiny else (STREAMS, TOKENS)
    streams: Streams = [[] for _ in range(count)]
    async with httpx.AsyncClient(timeout=HANG_GUARD_S, limits=httpx.Limits(max_connections=None)) as client:
        work = [ask(client, url, number, tokens, stream) for number, stream in enumerate(streams)]
        if cluster is not None and strike is not None:
            work.append(strike(cluster, streams, tokens))
        await asyncio.gather(*work)
    assert all(len(stream) == tokens for stream in streams), [len(stream) for stream in streams]
    return streams


async def ask(client: httpx.AsyncClient, url: str, number: int, tokens: int, into: list[int]) -> None:
    """One request, sampled, whose token ids are written down as they come."""
    prompt = [2 + (number * 7 + place) % (VOCAB - 2) for place in range(SHORTEST + 5 * number)]
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


async def kill_one(cluster: Cluster, streams: Streams, tokens: int) -> None:
    """In the middle of the streams; not at all where one is over too soon."""
    while not is_time([len(stream) for stream in streams], tokens):
        if max(map(len, streams)) == tokens:
            return
        await asyncio.sleep(0.005)
    os.kill(cluster.node_pid("--node-id=decode-1"), signal.SIGKILL)


def is_time(lengths: list[int], tokens: int) -> bool:
    """More than half of the streams are in their first half: either of two nodes has some, taken in turn."""
    return sum(KILLED_AFTER <= length <= tokens // 2 for length in lengths) > len(lengths) // 2


def write_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """A word for each id."""
    words = {f"w{number}": number for number in range(vocab)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
