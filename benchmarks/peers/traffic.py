"""What is asked of a server over HTTP, the same of each: streams of /v1/completions, each on a connection of its own.

Prompts are random token ids, so that no prefix is cached; all answers but those of the draft prompts have a fixed
length.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.http_load import body
from benchmarks.sse_client import Stream, percentile, stream_completion

RUNNING = 4  # streams, while long prompts come
QUIET = 256  # tokens of each, while none come


@dataclass(frozen=True, slots=True)
class AtOnce:
    """What so many streams saw that were sent at the same time."""

    tok_s: float
    ttft_p50_ms: float


def tokens_or_texts(event: dict[str, Any]) -> int:
    """Of an event of a stream. llama-server names no ids: there an event is a token."""
    choices = event.get("choices", ())
    return sum(len(one.get("token_ids") or ()) or (1 if one.get("text") else 0) for one in choices)


async def ask(port: int, fields: dict[str, object]) -> Stream:
    """RuntimeError when the stream ended with an error, or came to nothing."""
    counted = {**fields, "stream_options": {"include_usage": True}}
    stream = await stream_completion(port, counted, tokens_or_texts)
    if stream.error or not stream.token_times:
        raise RuntimeError(f"a stream failed: {stream.error or 'no token came'}")
    return stream


async def at_once(port: int, streams: int, rng: random.Random, prompt: int, answer: int) -> AtOnce:
    """Tokens per second from the first request to the last token. The server itself says how many there were: one that
    holds back half a character sends fewer events than tokens."""
    done = await asyncio.gather(*(ask(port, body(rng, prompt, answer)) for _ in range(streams)))
    wall = max(stream.token_times[-1] for stream in done) - min(stream.sent for stream in done)
    short = [stream.num_tokens for stream in done if stream.num_tokens != answer]
    if short:
        raise RuntimeError(f"answers of {short} tokens, where {answer} were asked for")
    ttft = percentile([stream.ttft for stream in done], 0.5)
    return AtOnce(sum(stream.num_tokens for stream in done) / wall, 1e3 * ttft)


async def beside_prompts(port: int, rng: random.Random, answer: int, prompts: Sequence[int]) -> dict[str, float]:
    """The longest ITL but 1 % of four streams, in ms: while nothing else runs, and while prompts of these lengths come
    one after another. The first and last token of a stream are no part of the quiet time: others start and end then."""
    alone = await asyncio.gather(*(ask(port, body(rng, 64, min(answer, QUIET))) for _ in range(RUNNING)))
    quiet = gaps(alone, max(s.token_times[0] for s in alone), min(s.token_times[-1] for s in alone))
    runners = [asyncio.create_task(ask(port, body(rng, 64, answer))) for _ in range(RUNNING)]
    await asyncio.sleep(1.0)
    begin = asyncio.get_running_loop().time()
    took = [(await ask(port, body(rng, length, 2))).ttft for length in prompts]
    end = asyncio.get_running_loop().time()
    busy = gaps(await asyncio.gather(*runners), begin, end)
    if not quiet or not busy:
        raise RuntimeError("no token came while the prompts did: the streams are too short for this machine")
    quiet_ms, during_ms = 1e3 * percentile(quiet, 0.99), 1e3 * percentile(busy, 0.99)
    return {
        "quiet_itl_p99_ms": quiet_ms,
        "during_itl_p99_ms": during_ms,
        "during_over_quiet": during_ms / quiet_ms,
        "long_prompt_ttft_ms": 1e3 * statistics.median(took),
        "gaps": float(len(busy)),
    }


def gaps(streams: Sequence[Stream], begin: float, end: float) -> list[float]:
    """Seconds between tokens that followed one another within this time."""
    return [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.token_times, stream.token_times[1:], strict=False)
        if begin <= earlier and later <= end
    ]


async def answer_alone(port: int, prompt: Sequence[int], temperature: float, answer: int) -> tuple[int, float]:
    """(tokens after the first one, the seconds they took). It ends where the model ends it."""
    fields = {"model": "bench", "prompt": list(prompt), "max_tokens": answer, "temperature": temperature, "seed": 1}
    stream = await ask(port, fields)
    return stream.num_tokens - 1, stream.token_times[-1] - stream.token_times[0]
