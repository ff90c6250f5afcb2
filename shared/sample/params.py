"""Turn a SamplingBatch into named arrays with concatenated lists, for the torch and Triton samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from shared.core.sampling_params import FILTERS, NUMBERS, PENALTIES
from shared.kernel.sampling.sample_constants import GREEDY_BELOW
from shared.sample.interface import SamplingBatch

A = TypeVar("A", np.ndarray, torch.Tensor)
# `*_ends` (B + 1,): row b's entries are [ends[b], ends[b + 1]).
Params: TypeAlias = dict[str, A]
GREEDY, FILTERED, PLAIN = 0, 1, 2  # modes: take the largest logit; draw among some ids; draw among all ids
OTHERWISE = ("top_k", "min_tokens")  # get another form


def params_of(batch: SamplingBatch, vocab_size: int) -> Params[np.ndarray]:
    """Convert a batch, without ids outside the vocabulary. Arrays are (B,) and integers int64 unless noted."""
    numbers = batch.numbers
    top_k = np.where(numbers["top_k"] > 0, numbers["top_k"], vocab_size).astype(np.int64)
    greedy = numbers["temperature"] < GREEDY_BELOW
    scale = np.where(greedy, np.float32(0), np.float32(1) / np.where(greedy, np.float32(1), numbers["temperature"]))
    filters = [numbers[one.name] != one.neutral for one in FILTERS if one.name != "top_k"]
    is_filtered = np.logical_or.reduce([top_k < vocab_size, *filters])
    penalties = [numbers[one.name] != one.neutral for one in PENALTIES]
    early = numbers["min_tokens"] > 0
    stops = [_inside(ids, vocab_size) if is_early else [] for ids, is_early in zip(batch.stop_ids, early, strict=True)]
    biases = [[(i, value) for i, value in row if 0 <= i < vocab_size] for row in batch.logit_bias]
    allowed = [_inside(ids, vocab_size) for ids in batch.allowed_ids]
    words = [[word for word in row if 0 <= word[-1] < vocab_size] for row in batch.bad_words]
    prompt_lens = batch.prompt_lens.astype(np.int64)
    return {
        **{one.array: batch.array(one) for one in NUMBERS if one.name not in OTHERWISE},  # float32 or int32
        "mode": np.where(greedy, GREEDY, np.where(is_filtered, FILTERED, PLAIN)),
        "scale": scale,  # float32, 1 / temperature; 0 for greedy rows
        "top_k": top_k,  # the vocabulary size without top-k
        "is_penalised": np.logical_or.reduce(penalties).astype(np.int64),  # 0 or 1
        "seeds": batch.seeds.view(np.int64),  # bits of the unsigned seed
        "prompt_lens": prompt_lens,
        "first_stop": prompt_lens + numbers["min_tokens"],  # first position that allows a stop token
        "num_logprobs": batch.num_logprobs.astype(np.int64),  # -1 if none are requested
        "stop_ids": _flat(stops, np.int64),  # of rows with min_tokens
        "stop_ends": _ends(stops),
        "bias_ids": _flat([[i for i, _ in row] for row in biases], np.int64),
        "bias_values": _flat([[value for _, value in row] for row in biases], np.float32),  # float32
        "bias_ends": _ends(biases),
        "is_limited": np.asarray([bool(ids) for ids in batch.allowed_ids], dtype=np.int64),  # 1: only allowed ids
        "allowed_ids": _flat(allowed, np.int64),
        "allowed_ends": _ends(allowed),
        "bad_ids": _flat([[word[-1] for word in row] for row in words], np.int64),  # last id of each bad word
        # (words, longest - 1), the word's other ids, padded with -1 on the left
        "bad_before": _before([word for row in words for word in row]),
        "bad_ends": _ends(words),
    }


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
