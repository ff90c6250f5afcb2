"""A server's answer as the judges see it, read from OpenAI's bodies and chunks in either API's form. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of an answer, with its log-probability and those of the most likely tokens, by text."""

    token: str
    logprob: float
    top: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToldUsage:
    prompt: int
    completion: int
    total: int
    cached: int | None = None  # None: not told


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """`ids` and `scores` are empty where the server shows none. `error`: why there is not an answer; "" otherwise."""

    text: str = ""
    thoughts: str = ""  # the reasoning that some servers show beside the text
    ids: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    finish: str = ""
    usage: ToldUsage | None = None
    error: str = ""
    status: int = 200

    @property
    def num_shown(self) -> int:
        """Return the number of tokens that the server showed one by one; 0 if unknown."""
        return len(self.ids) or len(self.scores)

    @property
    def is_refused(self) -> bool:
        """Return whether the server does not take a field of the request."""
        return self.status in (400, 404, 405, 415, 422, 501)


def read_answer(parts: Iterable[Mapping[str, Any]]) -> RecordedAnswer:
    """Read a stream's chunks, or the one body of an answer that was not streamed. Only choice 0 counts."""
    text, thoughts, finish = "", "", ""
    ids: list[int] = []
    scores: list[TokenScore] = []
    usage: ToldUsage | None = None
    try:
        for part in parts:
            if part.get("error"):
                return RecordedAnswer(error=f"in the stream: {part['error']}", status=500)
            if part.get("usage"):
                usage = usage_of(part["usage"])
            for choice in part.get("choices") or ():
                if choice.get("index"):
                    continue
                said = choice.get("delta") or choice.get("message") or {}
                text += said.get("content") or choice.get("text") or ""
                thoughts += said.get("reasoning_content") or said.get("reasoning") or ""
                ids += choice.get("token_ids") or ()
                scores += scores_of(choice.get("logprobs") or {})
                finish = choice.get("finish_reason") or finish
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        return RecordedAnswer(error=f"not OpenAI's form: {error!r}", status=500)
    if not finish:
        return RecordedAnswer(error="the answer has no finish_reason: it broke off", status=500)
    return RecordedAnswer(text, thoughts, tuple(ids), tuple(scores), finish, usage)


def usage_of(told: Mapping[str, Any]) -> ToldUsage:
    details = told.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return ToldUsage(
        int(told.get("prompt_tokens", 0)),
        int(told.get("completion_tokens", 0)),
        int(told.get("total_tokens", 0)),
        None if cached is None else int(cached),
    )


def scores_of(logprobs: Mapping[str, Any]) -> list[TokenScore]:
    """Read the form of chat completions (`content`), which llama.cpp also uses elsewhere, or that of completions."""
    if logprobs.get("content"):
        return [
            TokenScore(
                one["token"],
                float(one["logprob"]),
                {top["token"]: float(top["logprob"]) for top in reversed(one.get("top_logprobs") or ())},
            )
            for one in logprobs["content"]
        ]
    tokens, chosen = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [{}] * len(tokens)
    return [
        TokenScore(token, float(logprob), {name: float(value) for name, value in (top or {}).items()})
        for token, logprob, top in zip(tokens, chosen, tops, strict=True)
    ]
