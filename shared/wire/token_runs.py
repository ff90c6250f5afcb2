"""The parts of messages that report one sequence's tokens and end."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.core.sampling_params import MAX_TOP_LOGPROBS
from shared.wire.ranges import MAX_RUNS, Count, Real, Text, TokenId
from shared.wire.request_key import Key


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probabilities of a token and of the likeliest tokens in its place."""

    logprob: Real
    top_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOP_LOGPROBS)]
    top_logprobs: Annotated[tuple[Real, ...], Meta(max_length=MAX_TOP_LOGPROBS)]


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one sequence. first_pos is the first token's position in the sequence's output, from 0."""

    key: Key
    first_pos: Count
    ids: Annotated[list[TokenId], Meta(max_length=MAX_RUNS)]
    logprobs: Annotated[list[TokenLogprob], Meta(max_length=MAX_RUNS)]  # empty unless the request wants them


class SequenceEnd(msgspec.Struct, frozen=True, array_like=True):
    key: Key
    reason: Text  # a core.states.FinishReason
    num_output_tokens: Count
    cached_tokens: Count
    error_code: Text  # a code of wire/errors.py; "" unless `reason` is "error"
    error_message: Text
