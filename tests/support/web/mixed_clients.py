"""Clients that stream a mix of everything that must survive a lost node, and what each must get: HashLM's reference.

greedy, seeded sampling, n > 1, logprobs, penalties, stop strings, min_tokens, sequences that end early
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from shared.core.keys import sequence_seed
from shared.core.sampling_params import SamplingParams
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.oracles.hashlm_reference import reference_run

EOS = 95
NUM_KINDS = 8
LOGPROB_TOLERANCE = 1e-4
Meanwhile = Callable[[], Coroutine[Any, Any, None]]


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(32 + i) for i in ids if i != EOS)


@dataclass
class Answer:
    """One choice, wanted or got."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Client:
    """One request and what came of it. `arrivals`: when each event with tokens came. `usage`: if it was asked for."""

    prompt: list[int]
    fields: dict[str, Any]
    sampling: SamplingParams
    got: list[Answer] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.got)

    def wanted(self) -> list[Answer]:
        return [self._reference(index) for index in range(self.fields.get("n", 1))]

    def _reference(self, index: int) -> Answer:
        limit = self.sampling.max_tokens
        run = reference_run(self.prompt, self.sampling, sequence_seed(self.fields["seed"], index), limit)
        ids, text, reason = run.ids, text_of(run.ids), run.finish_reason
        stop = self.fields.get("stop")
        if stop and stop in text:
            text, reason = text[: text.index(stop)], "stop"
            ids = ids[: next(count for count in range(len(ids) + 1) if stop in text_of(ids[:count]))]
        wants = "logprobs" in self.fields
        return Answer(ids, text, reason, run.logprobs[: len(ids)] if wants else [])

    def check(self) -> None:
        """Equal to the stream of a run that nothing happened to."""
        assert not self.error, f"{self.error} after {self.num_tokens} tokens of {self.fields}"
        for index, (got, wanted) in enumerate(zip(self.got, self.wanted(), strict=True)):
            where = f"choice {index} of {self.fields}"
            assert got.ids == wanted.ids, f"{where}: differs at {first_difference(got.ids, wanted.ids)}"
            assert (got.text, got.finish_reason) == (wanted.text, wanted.finish_reason), where
            assert len(got.logprobs) == len(wanted.logprobs), where
            pairs = zip(got.logprobs, wanted.logprobs, strict=True)
            assert all(abs(a - b) < LOGPROB_TOLERANCE for a, b in pairs), where


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def make_client(index: int, max_tokens: int, prompt_len: int = 0) -> Client:
    rng = random.Random(index)
    prompt = [rng.randrange(95) for _ in range(prompt_len or rng.randint(40, 220))]
    kind = index % NUM_KINDS
    sampled = kind in (1, 2, 4, 6, 7) or (kind == 5 and index % 16 > NUM_KINDS)
    fields: dict[str, Any] = {"temperature": 0.8 if sampled else 0.0, "seed": 1000 + index, "ignore_eos": kind < 6}
    fields |= [
        {}, {}, {"n": 3}, {"logprobs": 2},
        {"logprobs": 1, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1},
        {}, {"min_tokens": max_tokens // 2}, {"n": 2, "min_tokens": 10},
    ][kind]  # fmt: skip
    names = ("temperature", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens")
    known = {name: fields[name] for name in names if name in fields}
    sampling = SamplingParams(max_tokens, **known, stop_token_ids=() if fields["ignore_eos"] else (EOS,))
    client = Client(prompt, fields, sampling)
    if kind == 5:  # three characters of its own answer, late in it
        text = client.wanted()[0].text
        fields["stop"] = text[max_tokens * 3 // 4 :][:3]
    return client


async def stream(http: httpx.AsyncClient, url: str, client: Client) -> None:
    """Fills in what came; an error event or a bad status ends in `error`."""
    client.got = [Answer() for _ in range(client.fields.get("n", 1))]
    body = {"model": "hashlm", "prompt": client.prompt, "max_tokens": client.sampling.max_tokens, "stream": True}
    body |= {"return_token_ids": True, **client.fields}
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            client.error = (await response.aread()).decode()
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                take(client, json.loads(line[6:]))


def take(client: Client, event: dict[str, Any]) -> None:
    if "error" in event:
        client.error = json.dumps(event["error"])
        return
    client.usage = event.get("usage") or client.usage
    for choice in event["choices"]:
        answer = client.got[choice["index"]]
        assert answer.finish_reason is None, "tokens after the end"
        answer.ids += choice.get("token_ids") or []
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"]
        answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        if choice.get("token_ids"):
            client.arrivals.append(time.monotonic())


async def stream_all(
    url: str,
    clients: Sequence[Client],
    meanwhile: Meanwhile | None = None,
    timeout_s: float = HANG_GUARD_S,
) -> None:
    """All at once; `meanwhile` runs beside them."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout_s, limits=limits) as http, asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(stream(http, url, client))
        if meanwhile is not None:
            tasks.create_task(meanwhile())


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)


async def under_load(url: str, num_users: int, meanwhile: Callable[[], bool]) -> list[Client]:
    """Each user streams one answer after another, until `meanwhile` has come true. Returns all of them, to check."""
    clients: list[Client] = []
    is_over = asyncio.Event()

    async def user(number: int) -> None:
        for round_ in range(10_000):
            clients.append(make_client(number + num_users * round_, 60))
            await stream_all(url, [clients[-1]])
            if is_over.is_set():
                return

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_users):
            tasks.create_task(user(number))
        await wait_until(meanwhile)
        is_over.set()
    return clients
