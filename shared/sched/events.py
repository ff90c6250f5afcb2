"""What the scheduler tells the node after a step. Values; the node turns them into wire messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.core.keys import RequestKey
from shared.core.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Emitted:
    """Consecutive output tokens; first_pos counts from the request's first output token."""

    key: RequestKey
    first_pos: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    key: RequestKey
    reason: FinishReason
    num_output_tokens: int
    cached_tokens: int
    error_code: str = ""
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """KV of the first num_tokens tokens of a request that will be handed over is final."""

    request: Request
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The last chunk of a request to hand over was processed: `token` goes into its PREBUILT record."""

    request: Request
    token: int
    committed: int
    logprobs: tuple[TokenLogprob, ...]
    draft_state: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GrantRevoked:
    """A granted request lost its reservation (retracted or aborted). Its old row is tagged `held` until the decode
    side knows that no pull writes into its pages, and calls `release_held(row)`."""

    request: Request
    row: int
    retracted: bool  # True: the request lives on here and is prefilled locally


@dataclass(frozen=True, slots=True)
class HandoffUnpinned:
    """A prompt without a grant gave its memory to one that has one. What was said of its KV is void: it is prefilled
    again, and ChunkReady and PrefillDone come again."""

    request: Request


SchedEvent = Emitted | Ended | ChunkReady | PrefillDone | GrantRevoked | HandoffUnpinned


@dataclass(slots=True)
class SchedCounters:
    """Totals since the scheduler was made, for the node's metrics."""

    retractions: int = 0
    prompt_tokens: int = 0  # computed here
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    spec_steps: int = 0  # verifies, one per request and step
    spec_accepted_tokens: int = 0  # without the bonus token
