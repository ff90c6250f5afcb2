"""`core.sampling_params.SamplingParams` on the wire: its record, and the check of what a node gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.core.errors import WireError
from shared.core.sampling_params import (
    BY_NAME,
    FILTERS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    PARAMETERS,
    Bounds,
    SamplingParams,
    listed,
)
from shared.wire.ranges import MAX_REAL, BadWord, Int32, Real, TokenId
from shared.wire.versions import SINCE

NUMBERS = {int: Int32, float: Real}
LISTS = {
    "logit_bias": Annotated[list[tuple[TokenId, Real]], Meta(max_length=MAX_LOGIT_BIAS)],
    "allowed_token_ids": Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)],
    "bad_words": Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)],
    "stop_token_ids": Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)],
    "grammar": Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)],
}

REALS = tuple(one.name for one in PARAMETERS if one.kind is float)
LIMITED = tuple(name for name in REALS if BY_NAME[name].nodes != Bounds())
COUNTS = ("max_tokens", "min_tokens", *(one.name for one in FILTERS if one.kind is int))
LOGPROBS = ("num_logprobs", "prompt_logprobs")


class Sampling(msgspec.Struct, frozen=True):
    """Senders of earlier versions lack newer parameters, and mean their neutral values."""

    __annotations__ = {one.name: LISTS.get(one.name) or NUMBERS[one.kind] for one in PARAMETERS}
    locals().update({one.name: one.neutral for one in PARAMETERS if one.neutral is not None})


def sampling_to_wire(sampling: SamplingParams) -> Sampling:
    lists = {
        "logit_bias": list(sampling.logit_bias),
        "allowed_token_ids": list(sampling.allowed_token_ids),
        "bad_words": [list(word) for word in sampling.bad_words],
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    return Sampling(**{one.name: getattr(sampling, one.name) for one in PARAMETERS} | lists)


def version_for(sampling: SamplingParams) -> int:
    """Return the first protocol that knows all parameters which the request uses. An earlier node would skip some."""
    rows = ((row.partition("."), since) for row, since in SINCE.items())
    own = ((name, since) for (kind, _, name), since in rows if kind == "Sampling")
    return max((since for name, since in own if getattr(sampling, name) != BY_NAME[name].neutral), default=0)


def sampling_of(wire: Sampling) -> SamplingParams:
    """Raise WireError for values that would harm the sampler."""
    given = {one.name: getattr(wire, one.name) for one in PARAMETERS}
    reals = (*(given[name] for name in REALS), *(bias for _, bias in given["logit_bias"]))
    if not all(abs(real) <= MAX_REAL for real in reals):  # also refuses NaN
        raise WireError("sampling: a number that float32 can't hold")
    _check(given, COUNTS, listed(COUNTS, "or"))
    _check(given, LIMITED, listed(LIMITED, "or"))
    if len(given["logit_bias"]) > MAX_LOGIT_BIAS or len(given["stop_token_ids"]) > MAX_STOP_TOKEN_IDS:
        raise WireError("sampling: too many logit_bias or stop_token_ids entries")
    _check(given, LOGPROBS, "num_logprobs")
    tuples = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return SamplingParams(**given | tuples | {"bad_words": tuple(map(tuple, given["bad_words"]))})


def _check(given: Mapping[str, Any], names: Sequence[str], text: str) -> None:
    if not all(BY_NAME[name].nodes.hold(given[name]) for name in names):
        raise WireError(f"sampling: {text} out of range")
