"""The mix of `mixed_clients` through the openai SDK: what a user's program gets, errors included."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import httpx
import openai

from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.mixed_clients import NUM_KINDS, Answer, Client, make_client, take

LENGTHS = (0, 700, 0, 400, 1000, 0, 300, 500)  # of prompts; 0: by seed, some dozens
_rounds = itertools.count(1)
BEYOND_OPENAI = ("ignore_eos", "min_tokens", "repetition_penalty")


def fresh_clients(max_tokens: int = 60) -> list[Client]:
    """One of each kind, half with prompts of several chunks; never a prompt twice: caches would hide hand-offs."""
    first = NUM_KINDS * next(_rounds)
    return [make_client(first + kind, max_tokens, LENGTHS[kind]) for kind in range(NUM_KINDS)]


def check_whole_or_broken(client: Client) -> None:
    """Without an error it got the whole answer; with one, the beginning of the unbroken run."""
    if not client.error:
        client.check()
        return
    for got, wanted in zip(client.got, client.wanted(), strict=True):
        assert got.ids == wanted.ids[: len(got.ids)], client.fields


async def stream(sdk: openai.AsyncOpenAI, client: Client) -> None:
    """Fills in what came. A declared error (an event in the stream, a status) ends in `error`; silence fails."""
    client.got = [Answer() for _ in range(client.fields.get("n", 1))]
    known = {name: value for name, value in client.fields.items() if name not in BEYOND_OPENAI}
    beyond = {name: value for name, value in client.fields.items() if name in BEYOND_OPENAI}
    try:
        async with asyncio.timeout(HANG_GUARD_S):
            events = await sdk.completions.create(
                model="hashlm",
                prompt=client.prompt,
                max_tokens=client.sampling.max_tokens,
                stream=True,
                extra_body={"return_token_ids": True, **beyond},
                **known,
            )
            async for event in events:
                take(client, event.model_dump())
    except TimeoutError:
        raise AssertionError(
            f"no end within {HANG_GUARD_S} s, after {client.num_tokens} tokens: {client.fields}"
        ) from None
    except (openai.APIError, httpx.HTTPError) as error:  # the SDK passes on what breaks in mid stream
        client.error = f"{type(error).__name__}: {error}"
    if not client.error:
        assert all(answer.finish_reason for answer in client.got), f"a stream without an end: {client.fields}"


async def stream_all(
    url: str, clients: Sequence[Client], meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> None:
    """All at once; `meanwhile` runs beside them."""
    limits = openai.DefaultAsyncHttpxClient(limits=openai.DEFAULT_CONNECTION_LIMITS)
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=limits) as sdk,
        asyncio.TaskGroup() as tasks,
    ):
        for client in clients:
            tasks.create_task(stream(sdk, client))
        if meanwhile is not None:
            tasks.create_task(meanwhile())


def run_clients(url: str, clients: Sequence[Client]) -> None:
    asyncio.run(stream_all(url, clients))
