"""The sampler's inputs and outputs. One function for plain steps, prefill's first token and verify windows."""

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
    """Per-row parameters as arrays of values: frozen into a StepPlan, so it never changes once launched. B rows."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    repetition_penalty: npt.NDArray[np.float32]
    presence_penalty: npt.NDArray[np.float32]
    frequency_penalty: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint64]
    prompt_lens: npt.NDArray[np.int32]  # the original prompt: output tokens are those at positions >= it
    min_tokens: npt.NDArray[np.int32]
    num_logprobs: npt.NDArray[np.int32]
    stop_ids: tuple[tuple[int, ...], ...]
    logit_bias: tuple[tuple[tuple[int, float], ...], ...]
    allowed_ids: tuple[tuple[int, ...], ...]  # (): all of them
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
    """What penalties and bad words read, on the device: the tokens before an output, prompt, emitted and in flight, by
    (request row, position), and of a verify window the output's own draft ancestors. Siblings share a position, so
    drafts have no place in `tokens`.

    common and drafted are both there or both None: an output at input position p then counts its row's tokens 0..p.
    """

    tokens: torch.Tensor  # (rows, max_context) int32
    rows: torch.Tensor  # (B,) int64, which row of `tokens` each batch row reads
    common: torch.Tensor | None = None  # (E,) int64, how many of them each output counts
    drafted: torch.Tensor | None = None  # (E, N) int32, the oldest first, all of them output; -1: none


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which ids each of E outputs may be, on the host: of outputs whose request has a grammar."""

    rows: npt.NDArray[np.int64]  # (E,) into `bits`; -1: all ids are allowed
    bits: npt.NDArray[np.uint32]  # (M, words) a bit for each id, the lowest first; words >= vocab / 32


@dataclass(frozen=True, slots=True)
class DeviceMasks:
    """The same on a device, with at least one mask."""

    rows: torch.Tensor  # (E,) int64
    bits: torch.Tensor  # (M, words) int32


@dataclass(slots=True)
class SampleOutput:
    """E outputs; K = max(num_logprobs) of the batch, 0 columns when none. logprob is 0 where not asked for."""

    ids: torch.Tensor  # (E,) int64
    logprobs: torch.Tensor  # (E,) float32
    top_ids: torch.Tensor  # (E, K) int64
    top_logprobs: torch.Tensor  # (E, K) float32
