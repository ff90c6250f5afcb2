"""Router, prefill and decode with a real model over HTTP: the CPU's tokens, every kind of request, a killed node, and
how long the first token and the next ones take."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.gpu.checks.pair import is_time, write_tokenizer
from tests.gpu.pack import find_model
from tests.gpu.place import Place
from tests.gpu.shapes import SHAPES
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.tiny_llama import VOCAB, write_tiny_llama

PROMPTS = (
    "The capital of France is", "def fib(n):\n", "Once upon a time", "Water boils at", "1, 2, 3, 4,",
    " ".join(map(str, range(1, 60))),
)  # fmt: skip
TOKENS, TINY_TOKENS = 64, 8
ALONE = 8  # requests one after the other
KILLED_OF, TINY_KILLED_OF = 300, 1500  # tokens of each stream over a node that is killed: some are left when it is
# one request with each kind of parameter; all must be answered
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.8, "seed": 1},
    "top_p": {"temperature": 1, "top_p": 0.9},
    "top_k": {"temperature": 1, "top_k": 20},
    "min_p": {"temperature": 1, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {"17": 5}},
    "allowed ids": {"allowed_token_ids": [5, 9, 17]},
    "logprobs": {"logprobs": 3},
    "min_tokens": {"min_tokens": 4, "ignore_eos": False},
    "several": {"n": 3, "temperature": 1},
    "stop string": {"stop": ["w3"], "ignore_eos": False},
    "bad words": {"bad_words": ["w7"]},
    "grammar": {"response_format": {"type": "json_object"}, "ignore_eos": False},
    "a long prompt": {"prompt": [3, 5, 7, 11] * 120},
}
NO_GRAMMAR = ("grammar",)  # the tiny model's words are no JSON


@dataclass
class Stream:
    """Ids of one answer, and when they came, in seconds after it was asked for."""

    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    is_over: bool = False  # whole, or failed

    def ask(self, url: str, body: dict[str, Any]) -> None:
        try:
            self._read(url, body)
        finally:
            self.is_over = True

    def _read(self, url: str, body: dict[str, Any]) -> None:
        began = time.perf_counter()
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=HANG_GUARD_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                told = json.loads(line.removeprefix("data: "))
                assert "error" not in told, told
                ids = [one for choice in told["choices"] for one in choice.get("token_ids") or ()]
                self.ids += ids
                self.times += [time.perf_counter() - began] * len(ids)


def same_tokens(place: Place) -> dict[str, object]:
    """Greedy answers in float32: those of the same program on the CPU."""
    with folder() as logs:
        wanted, got = (
            greedy(logs, place, device_flags(place, device)) for device in ("cpu", "cpu" if place.tiny else "cuda")
        )
        assert place.tiny or "transport=cuda_ipc" in (logs / "up.log").read_text(), "no hand-off took it"
    equal = sum(a == b for a, b in zip(wanted, got, strict=True))
    assert equal == len(wanted), f"{len(wanted) - equal} of {len(wanted)} answers differ: {got} instead of {wanted}"
    return {"answers": len(got), "tokens": sum(map(len, got))}


def everything(place: Place) -> dict[str, object]:
    """Each kind of request is answered; 32 streams at once end whole; four streams over a decode node that is killed
    are those of an unhurt cluster."""
    flags = (*device_flags(place, "cpu" if place.tiny else "cuda", num_decode=2), "--policy", "round_robin")
    figures: dict[str, object] = {}
    dtype = "float32" if place.tiny else "bfloat16"
    with folder() as logs, up(logs, place, (*flags, "--dtype", dtype)) as cluster:
        for kind, more in KINDS.items():
            if place.tiny and kind in NO_GRAMMAR:
                continue
            body = {**body_of(PROMPTS[2], 12, place), **more}
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S)
            assert answer.status_code == 200, f"{kind}: {answer.status_code} {answer.text[:500]}"
        tokens = TINY_TOKENS if place.tiny else 128
        many = [body_of(f"{PROMPTS[number % 6]} {number}", tokens, place) for number in range(32)]
        began = time.perf_counter()
        at_once(cluster.url, many)
        figures["32 streams, tokens/s"] = 32 * tokens / (time.perf_counter() - began)
        whole = TINY_KILLED_OF if place.tiny else KILLED_OF
        bodies = [{**body_of(prompt, whole, place), "temperature": 0.8, "seed": 3} for prompt in PROMPTS[:4]]
        wanted = [stream.ids for stream in at_once(cluster.url, bodies)]
        hurt = at_once(cluster.url, bodies, lambda streams: kill_one(cluster, streams, whole))
        assert [stream.ids for stream in hurt] == wanted, "a stream that went on elsewhere has other tokens"
        figures["streams that went on elsewhere"] = resumed = cluster.metrics()["baton_resumed_total", ""]
        assert resumed > 0, "no stream was the killed node's"
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
    return figures


def latency(place: Place) -> dict[str, object]:
    """First token and gaps at the shapes of a 0.6B model with random weights, through HTTP."""
    shape = SHAPES["0.6B"]
    prompt, out, many = (20, 8, 4) if place.tiny else (1024, 128, 32)
    with folder() as logs:
        made = logs / "model"
        if place.tiny:
            write_tiny_llama(made)
        else:
            write_tiny_llama(
                made, heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
                hidden=shape.hidden_size, inner=shape.intermediate_size, layers=shape.num_layers,
                vocab=shape.vocab_size, context=4096, dtype=torch.bfloat16,
            )  # fmt: skip
        write_tokenizer(made, VOCAB if place.tiny else shape.vocab_size)
        flags = ("--model", str(made), *device_flags(place, "cpu" if place.tiny else "cuda"))
        with baton_up(logs / "latency.log", *flags) as cluster:
            bodies = [
                {**body_of("", out, place, "model"), "prompt": [2 + (7 * number + at) % 100 for at in range(prompt)]}
                for number in range(ALONE + many)
            ]
            alone = [at_once(cluster.url, [body])[0] for body in bodies[:ALONE]][1:]  # the first one warms up
            together = at_once(cluster.url, bodies[ALONE:])
    figures = {f"{name}, alone": value for name, value in told(alone).items()}
    return figures | {f"{name}, {many} at once": value for name, value in told(together).items()}


def told(streams: Sequence[Stream]) -> dict[str, object]:
    gaps = [after - before for stream in streams for before, after in zip(stream.times, stream.times[1:], strict=False)]
    return {
        "first token, ms": statistics.median(stream.times[0] for stream in streams) * 1e3,
        "gap between tokens, mean ms": statistics.fmean(gaps) * 1e3,
    }


def greedy(logs: Path, place: Place, flags: Sequence[str]) -> list[list[int]]:
    with up(logs, place, (*flags, "--dtype", "float32")) as cluster:
        asked = [body_of(prompt, TINY_TOKENS if place.tiny else TOKENS, place) for prompt in PROMPTS]
        return [stream.ids for stream in (at_once(cluster.url, [body])[0] for body in asked)]


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextlib.contextmanager
def up(logs: Path, place: Place, flags: Sequence[str]) -> Iterator[Cluster]:
    """With the shipped model, or a tiny one with words for tokens."""
    if place.tiny:
        model = str(logs / "tiny")
        if not Path(model).exists():
            write_tokenizer(write_tiny_llama(Path(model), context=2048))
    else:
        model = find_model()
    # even short prompts are handed over
    flags = ("--local-prefill-tokens", "1", *flags)
    with baton_up(logs / "up.log", "--model", model, "--served-model-name", "model", *flags) as cluster:
        yield cluster


def device_flags(place: Place, device: str, num_decode: int = 1) -> tuple[str, ...]:
    """All nodes share the first GPU."""
    nodes = ("--prefill", "1", "--decode", str(num_decode))
    if device == "cuda":
        shared = ",".join("0" * (1 + num_decode))
        return *nodes, "--device", "cuda", "--devices", shared, "--transport", "cuda_ipc", "--kv-bytes", "1GiB"
    return *nodes, "--device", "cpu", "--kv-bytes", "64MiB" if place.tiny else "512MiB"


def body_of(prompt: str, tokens: int, place: Place, model: str = "model") -> dict[str, Any]:
    """Greedy. The tiny model's tokenizer has a word for each id."""
    text = (
        [2 + (len(word) + 7 * number) % (VOCAB - 2) for number, word in enumerate(prompt.split())]
        if place.tiny
        else prompt
    )
    return {
        "model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": False,
        "return_token_ids": True,
    }  # fmt: skip


def at_once(
    url: str, bodies: Sequence[dict[str, Any]], meanwhile: Callable[[list[Stream]], None] | None = None
) -> list[Stream]:
    """All answers, asked for together. `meanwhile` gets the streams as they grow."""
    streams = [Stream() for _ in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = [
            pool.submit(stream.ask, url, {**body, "stream": True}) for stream, body in zip(streams, bodies, strict=True)
        ]
        if meanwhile is not None:
            striker = threading.Thread(target=meanwhile, args=(streams,), daemon=True)
            striker.start()
            striker.join(HANG_GUARD_S)
        for one in asked:
            one.result(HANG_GUARD_S)
    for stream, body in zip(streams, bodies, strict=True):
        assert len(stream.ids) == body["max_tokens"], f"{len(stream.ids)} of {body['max_tokens']} tokens"
    return streams


def kill_one(cluster: Cluster, streams: list[Stream], tokens: int) -> None:
    """In the middle of the streams; not at all where one is over too soon."""
    while not is_time([len(stream.ids) for stream in streams], tokens):
        if any(stream.is_over for stream in streams):
            return
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(cluster.node_pid("--node-id=decode-1"), signal.SIGKILL)
