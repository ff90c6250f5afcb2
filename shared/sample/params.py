"""Turn a SamplingBatch into arrays with concatenated lists, for the torch and Triton samplers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.sample_rules import GREEDY_BELOW
from shared.sample.interface import SamplingBatch

A = TypeVar("A", np.ndarray, torch.Tensor)
GREEDY, FILTERED, PLAIN = 0, 1, 2  # ways: take the largest logit; draw among some ids; draw among all ids
# the host's ways of all rows, if only the device knows them: GREEDY or PLAIN; any way
UNFILTERED, ANY = 3, 4


@dataclass(frozen=True, slots=True)
class Knobs(Generic[A]):
    """The parameters of B rows. `*_ends` (B + 1,) int64: row b's entries are [ends[b], ends[b + 1])."""

    way: A  # (B,) int64: GREEDY, FILTERED or PLAIN
    temperature: A  # (B,) float32
    scale: A  # (B,) float32, 1 / temperature; 0 for greedy rows
    top_k: A  # (B,) int64, the vocabulary size without top-k
    top_p: A  # (B,) float32
    log_min_p: A  # (B,) float32
    is_penalised: A  # (B,) int64 0 or 1
    repetition: A  # (B,) float32
    presence: A  # (B,) float32
    frequency: A  # (B,) float32
    seeds: A  # (B,) int64, bits of the unsigned seed
    prompt_lens: A  # (B,) int64
    first_stop: A  # (B,) int64, first position that allows a stop token
    num_logprobs: A  # (B,) int64, -1 if none are requested
    stop_ids: A  # int64, of rows with min_tokens
    stop_ends: A
    bias_ids: A  # int64
    bias_values: A  # float32
    bias_ends: A
    is_limited: A  # (B,) int64, 1 if only allowed ids may be drawn, else 0
    allowed_ids: A  # int64
    allowed_ends: A
    bad_ids: A  # int64, last id of each bad word
    bad_before: A  # (words, longest - 1) int64, the word's other ids, padded with -1 on the left
    bad_ends: A

    def named(self) -> dict[str, A]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def knobs_of(batch: SamplingBatch, vocab_size: int) -> Knobs[np.ndarray]:
    """Convert a batch, without ids outside the vocabulary."""
    greedy = batch.temperature < GREEDY_BELOW
    is_filtered = ((batch.top_k > 0) & (batch.top_k < vocab_size)) | (batch.top_p < 1) | (batch.min_p > 0)
    penalties = (batch.repetition_penalty != 1, batch.presence_penalty != 0, batch.frequency_penalty != 0)
    scale = np.where(greedy, np.float32(0), np.float32(1) / np.where(greedy, np.float32(1), batch.temperature))
    with np.errstate(divide="ignore"):
        log_min_p = np.log(batch.min_p).astype(np.float32)
    early = batch.min_tokens > 0
    stops = [_inside(ids, vocab_size) if is_early else [] for ids, is_early in zip(batch.stop_ids, early, strict=True)]
    biases = [[(i, value) for i, value in row if 0 <= i < vocab_size] for row in batch.logit_bias]
    words = [[word for word in row if 0 <= word[-1] < vocab_size] for row in batch.bad_words]
    prompt_lens = batch.prompt_lens.astype(np.int64)
    return Knobs(
        way=np.where(greedy, GREEDY, np.where(is_filtered, FILTERED, PLAIN)),
        temperature=batch.temperature,
        scale=scale,
        top_k=np.where(batch.top_k > 0, batch.top_k, vocab_size).astype(np.int64),
        top_p=batch.top_p,
        log_min_p=log_min_p,
        is_penalised=np.logical_or.reduce(penalties).astype(np.int64),
        repetition=batch.repetition_penalty,
        presence=batch.presence_penalty,
        frequency=batch.frequency_penalty,
        seeds=batch.seeds.view(np.int64),
        prompt_lens=prompt_lens,
        first_stop=prompt_lens + batch.min_tokens,
        num_logprobs=batch.num_logprobs.astype(np.int64),
        stop_ids=_flat(stops, np.int64),
        stop_ends=_ends(stops),
        bias_ids=_flat([[i for i, _ in row] for row in biases], np.int64),
        bias_values=_flat([[value for _, value in row] for row in biases], np.float32),
        bias_ends=_ends(biases),
        is_limited=np.asarray([bool(ids) for ids in batch.allowed_ids], dtype=np.int64),
        allowed_ids=_flat([_inside(ids, vocab_size) for ids in batch.allowed_ids], np.int64),
        allowed_ends=_ends([_inside(ids, vocab_size) for ids in batch.allowed_ids]),
        bad_ids=_flat([[word[-1] for word in row] for row in words], np.int64),
        bad_before=_before([word for row in words for word in row]),
        bad_ends=_ends(words),
    )


def _inside(ids: Sequence[int], vocab_size: int) -> list[int]:
    return [i for i in ids if 0 <= i < vocab_size]


def _flat(rows: Sequence[Sequence[float]], dtype: npt.DTypeLike) -> np.ndarray:
    return np.asarray([value for row in rows for value in row], dtype=dtype)


def _ends(rows: Sequence[Sequence[object]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _before(words: Sequence[Sequence[int]]) -> np.ndarray:
    longest = max((len(word) for word in words), default=1)
    padded = [(-1,) * (longest - len(word)) + tuple(word[:-1]) for word in words]
    return np.asarray(padded, dtype=np.int64).reshape(len(words), longest - 1)
