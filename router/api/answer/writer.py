"""The protocol that writes an answer's bytes.

opening -> more, more, ... -> ending       a stream of events or lines; `failed` may replace any of them
whole                                      an answer that is not streamed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import GenerationPlan
from router.api.answer.prompts import Prompts
from router.text.chat.interface import Tokenizer
from shared.core.errors import BatonError

COMMENT = b": waiting\n\n"
ENCODER = msgspec.json.Encoder()
NOT_CACHED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
SSE_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), *NOT_CACHED)


@dataclass(frozen=True, slots=True)
class Counts:
    """A request's token counts so far. `cached` is known at the end. `reasoning`: None if the model doesn't think."""

    prompt: int
    answer: int
    cached: int
    reasoning: int | None


@dataclass(slots=True)
class Times:
    """Seconds of the monotonic clock. Until tokens arrive, `first` and `last` are equal to `arrived`."""

    arrived: float = 0.0
    first: float = 0.0
    last: float = 0.0


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """`token`: random text in the answer's ids. `created`: seconds since 1970. `times` changes with each batch."""

    token: str
    created: int
    plan: GenerationPlan
    prompts: Prompts
    tokenizer: Tokenizer
    counts: Callable[[], Counts]
    times: Times = field(default_factory=Times)


class Writer(Protocol):
    """A delta's key is its choice's index."""

    answer_id: str
    headers: Sequence[tuple[bytes, bytes]]  # of a stream
    ping: bytes  # sent while no news arrives
    num_events: int  # number of events so far; set by the caller if the stream can be resumed

    def opening(self) -> bytes:
        """Call this method once the prompt's scores are known."""
        ...

    def more(self, deltas: Mapping[int, Delta]) -> bytes:
        """Return b"" if the batch shows nothing."""
        ...

    def ending(self) -> bytes:
        """Return the bytes after the last choice."""
        ...

    def failed(self, error: BatonError) -> bytes:
        """Return a failed stream's last bytes."""
        ...

    def whole(self, answers: Sequence[Delta]) -> bytes:
        """`answers`: one delta per choice."""
        ...


def ping_among_ids(ping: bytes) -> bytes:
    """Return the ping of a stream whose events have ids: a comment that the next event's lines follow.

    Behind an id, openai's decoder takes a comment's blank line for the end of an event without data, and fails."""
    return ping.removesuffix(b"\n") if ping == COMMENT else ping


def sse_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def named_event(event: Mapping[str, object]) -> bytes:
    """Put `type` on a line of its own, too: some clients read this line, others read the data."""
    return f"event: {event['type']}\n".encode() + sse_event(ENCODER.encode(event))
