"""Append a processed step's tokens to a request's output, cut them at a stop, and decide the end."""

from __future__ import annotations

from collections.abc import Sequence

from shared.core.request import Request
from shared.core.states import FinishReason
from shared.engine.plan import PromptScores, StepResult
from shared.sched.steps.events import Emitted
from shared.wire.messages import TokenLogprob
from shared.wire.ranges import MAX_REAL


def append_tokens(
    req: Request, run: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> tuple[Emitted, FinishReason | None]:
    """Append an accepted run. Return the emitted tokens, and why the request ends, if it does.

    The device published the whole run's length. The host cuts the run at a stop, so no later token reaches the client,
    the prefix cache or `usage`. `usage` counts the stop token.
    """
    first_pos = len(req.output_ids)
    reason: FinishReason | None = None
    for token in run:
        req.output_ids.append(token)
        reason = _finish_reason(req, token)
        if reason is not None:
            break
    ids = tuple(req.output_ids[first_pos:])
    return Emitted(req.key, first_pos, ids, tuple(logprobs[: len(ids)])), reason


def _finish_reason(req: Request, token: int) -> FinishReason | None:
    if token in req.ask.sampling.stop_token_ids:
        return FinishReason.STOP
    if len(req.output_ids) >= req.ask.sampling.max_tokens:
        return FinishReason.LENGTH
    return None


def finite(logprob: float) -> float:
    """Replace infinity and NaN, which the wire rejects."""
    return max(-MAX_REAL, min(MAX_REAL, logprob))


def entries_of(scores: PromptScores) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(finite(float(own)), tuple(ids.tolist()), tuple(map(finite, best.tolist())))
        for own, ids, best in zip(scores.logprobs, scores.top_ids, scores.top_logprobs, strict=True)
    )


def logprobs_of(req: Request, result: StepResult, index: int) -> list[TokenLogprob]:
    num = req.ask.sampling.num_logprobs
    if num < 0:
        return []
    return [
        TokenLogprob(
            logprob=finite(float(result.logprobs[index, j])),
            top_ids=tuple(result.top_ids[index, j, :num].tolist()),
            top_logprobs=tuple(map(finite, result.top_logprobs[index, j, :num].tolist())),
        )
        for j in range(int(result.accept_lens[index]))
    ]
