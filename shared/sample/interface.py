"""The sampler's inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Immutable sampling parameters of B rows."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    repetition_penalty: npt.NDArray[np.float32]
    presence_penalty: npt.NDArray[np.float32]
    frequency_penalty: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint64]
    prompt_lens: npt.NDArray[np.int32]  # length of the original prompt; the answer follows
    min_tokens: npt.NDArray[np.int32]
    num_logprobs: npt.NDArray[np.int32]
    stop_ids: tuple[tuple[int, ...], ...]
    logit_bias: tuple[tuple[tuple[int, float], ...], ...]
    allowed_ids: tuple[tuple[int, ...], ...]  # () allows all ids
    bad_words: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def build(cls, params: Sequence[SamplingParams], seeds: Sequence[int], prompt_lens: Sequence[int]) -> SamplingBatch:
        def column(name: str, dtype: type) -> npt.NDArray[Any]:
            return np.asarray([getattr(p, name) for p in params], dtype=dtype)

        return cls(
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            repetition_penalty=column("repetition_penalty", np.float32),
            presence_penalty=column("presence_penalty", np.float32),
            frequency_penalty=column("frequency_penalty", np.float32),
            seeds=np.asarray(seeds, dtype=np.uint64),
            prompt_lens=np.asarray(prompt_lens, dtype=np.int32),
            min_tokens=column("min_tokens", np.int32),
            num_logprobs=column("num_logprobs", np.int32),
            stop_ids=tuple(p.stop_token_ids for p in params),
            logit_bias=tuple(p.logit_bias for p in params),
            allowed_ids=tuple(p.allowed_token_ids for p in params),
            bad_words=tuple(p.bad_words for p in params),
        )

    def __len__(self) -> int:
        return len(self.temperature)


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
