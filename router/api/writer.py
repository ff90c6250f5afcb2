"""Who writes an answer's bytes, and what it is told beside the text. Each endpoint brings its own (generation_api.py).

opening -> more, more, ... -> ending       a stream of server-sent events; `failed` may come instead of any of them
whole                                      an answer that is not streamed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from router.api.choice_text import Delta
from router.api.generation_plan import GenerationPlan
from router.api.prompts import Prompts
from router.text.interface import Tokenizer
from shared.core.errors import BatonError

COMMENT = b": waiting\n\n"
ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a whole request so far. `cached` is known when an answer has ended. `reasoning`: None where the model
    does not think."""

    prompt: int
    answer: int
    cached: int
    reasoning: int | None


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What an answer says of itself. `token` is random: ids are made of it. `created`: seconds since 1970."""

    token: str
    created: int
    plan: GenerationPlan
    prompts: Prompts
    tokenizer: Tokenizer
    counts: Callable[[], Counts]


class Writer(Protocol):
    """Made for each request. Deltas are keyed by choice, prompt * n + sequence."""

    answer_id: str
    ping: bytes  # while nothing else is to be said
    num_events: int  # so far, as far as events are numbered; a stream that goes on sets it

    def opening(self) -> bytes:
        """Return what comes before the first token. What is asked of the prompt is known by then."""
        ...

    def more(self, deltas: Mapping[int, Delta]) -> bytes:
        """Return what one batch of tokens adds, b"" where that shows nothing."""
        ...

    def ending(self) -> bytes:
        """Return what comes after every choice has ended."""
        ...

    def failed(self, error: BatonError) -> bytes:
        """Return how a stream that can't go on says so."""
        ...

    def whole(self, answers: Sequence[Delta]) -> bytes:
        """Return the whole answer, of one delta for each choice."""
        ...


def sse_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def named_event(event: Mapping[str, object]) -> bytes:
    """Return a server-sent event. Its name is its `type`, which clients of typed streams look for in both places."""
    return f"event: {event['type']}\n".encode() + sse_event(ENCODER.encode(event))
