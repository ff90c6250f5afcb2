"""`core.sampling_params.SamplingParams` on the wire."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)
from shared.wire.ranges import BadWord, Int32, Real, TokenId


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_tokens: Int32
    temperature: Real
    top_k: Int32
    top_p: Real
    min_p: Real
    repetition_penalty: Real
    presence_penalty: Real
    frequency_penalty: Real
    logit_bias: Annotated[list[tuple[TokenId, Real]], Meta(max_length=MAX_LOGIT_BIAS)]
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)]
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)]
    min_tokens: Int32
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
    num_logprobs: Int32
    prompt_logprobs: Int32
