"""The sampler's inputs and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from shared.core.sampling_params import NUMBERS, PENALTIES, Parameter, SamplingParams
from shared.kernel.sampling.sample_constants import GREEDY_BELOW

TABLE = np.dtype([(one.name, np.float32 if one.kind is float else np.int32) for one in NUMBERS])
Made = TypeVar("Made")
_numbers = attrgetter(*(one.name for one in NUMBERS))


@dataclass(frozen=True)
class SamplingBatch:
    """Immutable sampling parameters of B rows."""

    numbers: npt.NDArray[np.void]  # (B,) TABLE
    seeds: npt.NDArray[np.uint64]
    prompt_lens: npt.NDArray[np.int32]  # length of the original prompt; the answer follows
    num_logprobs: npt.NDArray[np.int32]
    stop_ids: tuple[tuple[int, ...], ...]
    logit_bias: tuple[tuple[tuple[int, float], ...], ...]
    allowed_ids: tuple[tuple[int, ...], ...]  # () allows all ids
    bad_words: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def build(cls, params: Sequence[SamplingParams], seeds: Sequence[int], prompt_lens: Sequence[int]) -> SamplingBatch:
        return cls(
            numbers=np.array([_numbers(p) for p in params], dtype=TABLE),
            seeds=np.asarray(seeds, dtype=np.uint64),
            prompt_lens=np.asarray(prompt_lens, dtype=np.int32),
            num_logprobs=np.asarray([p.num_logprobs for p in params], dtype=np.int32),
            stop_ids=tuple(p.stop_token_ids for p in params),
            logit_bias=tuple(p.logit_bias for p in params),
            allowed_ids=tuple(p.allowed_token_ids for p in params),
            bad_words=tuple(p.bad_words for p in params),
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def array(self, one: Parameter) -> npt.NDArray[Any]:
        """Return what kernels read, (B,) float32 or int32."""
        values = np.ascontiguousarray(self.numbers[one.name])
        if not one.as_log:
            return values
        with np.errstate(divide="ignore"):
            logs: npt.NDArray[Any] = np.log(values)
        return logs

    @functools.cached_property
    def _kept(self) -> dict[Callable[[SamplingBatch], Any], Any]:
        return {}

    def kept(self, make: Callable[[SamplingBatch], Made]) -> Made:
        """Return make(self), made once for all steps of this batch. So engines in one process don't share a cache."""
        if make not in self._kept:
            self._kept[make] = make(self)
        made: Made = self._kept[make]
        return made

    @functools.cached_property
    def most_logprobs(self) -> int:
        return int(self.num_logprobs.max(initial=-1))

    @functools.cached_property
    def needs_history(self) -> bool:
        has_penalty = any((self.numbers[one.name] != one.neutral).any() for one in PENALTIES)
        return has_penalty or any(len(word) > 1 for words in self.bad_words for word in words)

    @functools.cached_property
    def takes_largest(self) -> bool:
        """Return whether every row takes its largest logit, without edits."""
        lists = (*self.logit_bias, *self.allowed_ids, *self.bad_words)
        edits = self.needs_history or any(map(len, lists)) or bool((self.numbers["min_tokens"] > 0).any())
        return not edits and bool((self.numbers["temperature"] < GREEDY_BELOW).all())


@dataclass(slots=True)
class History:
    """Earlier tokens on the device, for penalties and bad words: prompt, emitted tokens and tokens in flight.

    An output of a verify window also reads its draft ancestors. Siblings share a position, so they are in
    `drafted`, not in `tokens`. `common` and `drafted` are both set or both None. If None, an output at input position p
    reads tokens 0..p of its row."""

    tokens: torch.Tensor  # (rows, max_context) int32
    rows: torch.Tensor  # (B,) int64: each batch row's row of `tokens`
    common: torch.Tensor | None = None  # (E,) int64: how many tokens an output reads in its row
    # (E, N) int32: draft ancestors after the prompt, oldest first; -1: no token
    drafted: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Allowed ids of E outputs, on the host, for rows with a grammar."""

    rows: npt.NDArray[np.int64]  # (E,) each output's row of `bits`; -1 allows all ids
    bits: npt.NDArray[np.uint32]  # (M, words) one bit per id, lowest first; words >= vocab / 32


@dataclass(frozen=True, slots=True)
class DeviceMasks:
    """TokenMasks on a device, with at least one mask."""

    rows: torch.Tensor  # (E,) int64
    bits: torch.Tensor  # (M, words) int32


@dataclass(slots=True)
class SampleOutput:
    """The ids drawn for E outputs. K: the largest num_logprobs, at least 0. A logprob is 0 unless requested."""

    ids: torch.Tensor  # (E,) int64
    logprobs: torch.Tensor  # (E,) float32
    top_ids: torch.Tensor  # (E, K) int64
    top_logprobs: torch.Tensor  # (E, K) float32
