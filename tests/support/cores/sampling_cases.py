"""Batches that use every sampling parameter, for the two implementations of the sampler and for any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shared.core.sampling_params import BY_NAME, NUMBERS, SamplingParams
from shared.kernel.sampling.noise import torch_gumbel, torch_noise_bits, torch_row_keys
from shared.sample.interface import DeviceMasks, History, SampleOutput, SamplingBatch, TokenMasks
from shared.sample.params import params_of
from shared.sample.sampler_torch import OutputRows, rank_candidates_torch, sample_torch

VOCAB = 200
Sampler = Callable[..., SampleOutput]

THREE = tuple((first, second, 17) for first in range(30) for second in range(0, 30, 2))
KNOBS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB + 5},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.02},
    {"top_p": 0.95, "min_p": 0.01},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 0.0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.5, "frequency_penalty": -0.2, "repetition_penalty": 1.1, "top_p": 0.9},
    {"logit_bias": ((3, 5.0), (9, -100.0)), "temperature": 0.0},
    {"logit_bias": ((17, 100.0),)},
    {"min_tokens": 30, "stop_token_ids": (1, 2, 150)},
    {"min_tokens": 30, "stop_token_ids": (1, 2, 150), "temperature": 0.0, "logit_bias": ((2, 50.0),)},
    {"min_tokens": 5, "stop_token_ids": (1, 2, 150), "logit_bias": ((2, 50.0),)},
    {"allowed_token_ids": (3, 9, 40, 77, 150)},
    {"allowed_token_ids": (3, 9, 40), "temperature": 0.0, "logit_bias": ((77, 100.0),)},
    {"allowed_token_ids": (3, 9, 40, 77), "top_p": 0.6, "top_k": 3, "min_p": 0.01, "repetition_penalty": 1.3},
    {"bad_words": tuple((i,) for i in range(0, VOCAB, 2))},
    {"bad_words": tuple((first, i) for first in range(0, 30, 2) for i in range(VOCAB)), "temperature": 0.0},
    {"bad_words": THREE, "logit_bias": ((17, 100.0),)},
    {"bad_words": ((3,), (9,), (40,)), "allowed_token_ids": (3, 9, 40)},  # nothing else is left
    {"bad_words": (*THREE, (79,)), "allowed_token_ids": (17, 79), "min_tokens": 99, "stop_token_ids": (17,)},
]


def rows_on(batch: SamplingBatch, row_of: np.ndarray, logits: torch.Tensor) -> OutputRows:
    """What the engine uploads before it samples on tensors, on the device of the logits."""
    host, device = params_of(batch, logits.shape[1]), logits.device
    params = {name: torch.from_numpy(np.array(value)).to(device) for name, value in host.items()}
    return OutputRows(row_of, host, torch.from_numpy(row_of).to(device), params)


def sample_tensors(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: np.ndarray,
    positions: torch.Tensor,
    history: History | None,
    masks: TokenMasks | None = None,
) -> SampleOutput:
    """`sample_torch` with the arguments of `sample_cpu`."""
    there = masks_on(masks, logits.device) if masks is not None and (masks.rows >= 0).any() else None
    return sample_torch(logits, rows_on(batch, row_of, logits), positions, history, there)


def masks_on(masks: TokenMasks, device: torch.device) -> DeviceMasks:
    bits = torch.from_numpy(masks.bits.view(np.int32))
    return DeviceMasks(torch.from_numpy(masks.rows).to(device), bits.to(device))


def rank_tensors(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: np.ndarray,
    positions: torch.Tensor,
    history: History | None,
    num: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rank_candidates_torch` with the arguments of `rank_candidates`."""
    return rank_candidates_torch(logits, rows_on(batch, row_of, logits), positions, history, num)


def make_params(knobs: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **{**knobs, **more})


MOST_STOPS = tuple(range(2, VOCAB))
EFFECTS: dict[str, dict[str, Any]] = {
    **{one.name: {one.name: one.other} for one in NUMBERS},
    "min_tokens": {"min_tokens": BY_NAME["min_tokens"].other, "stop_token_ids": MOST_STOPS},
    "stop_token_ids": {"min_tokens": 2, "stop_token_ids": MOST_STOPS},
    "logit_bias": {"logit_bias": ((3, 6.0),)},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(0, VOCAB, 3))},
    "bad_words": {"bad_words": tuple((i,) for i in range(0, VOCAB, 2))},
}  # for each parameter that kernels read, a value with an effect


def draws_with(sampler: Sampler, sets: list[dict[str, Any]], num: int = 4) -> list[list[int]]:
    """Return `num` ids of a row for each set of parameters. Half of the ids are drawn before `min_tokens`.

    The logits nearly cancel the noise, so that the least likely id is drawn, and every parameter has an effect."""
    rows, answer, positions = len(sets), VOCAB + num // 2, torch.arange(VOCAB, VOCAB + num)
    first, second = torch_row_keys(torch.full((num,), 5), positions + 1)
    noise = torch_noise_bits(first.unsqueeze(1), second.unsqueeze(1), torch.arange(VOCAB, dtype=torch.int32))
    logits = -0.99 * torch_gumbel(noise)
    tokens = np.random.default_rng(12).integers(0, VOCAB, 2 * VOCAB).astype(np.int32)
    tokens[answer:] = int(logits[-1].argmin())
    history = History(torch.from_numpy(np.tile(tokens, (rows, 1))), torch.arange(rows))
    batch = SamplingBatch.build([make_params(one) for one in sets], [5] * rows, [answer] * rows)
    row_of = np.repeat(np.arange(rows), num)
    return sampler(logits.repeat(rows, 1), batch, row_of, positions.repeat(rows), history).ids.view(rows, num).tolist()


class Case:
    """A batch with one row per set of knobs and several outputs per row, as in a verify window."""

    def __init__(self, seed: int, outputs_per_row: int = 3, **more: Any) -> None:
        rng = np.random.default_rng(seed)
        self.params = [make_params(knobs, **more) for knobs in KNOBS]
        num_rows = len(self.params)
        self.seeds = [int(s) for s in rng.integers(0, 2**64, num_rows, dtype=np.uint64)]
        self.prompt_lens = rng.integers(1, 12, num_rows).tolist()
        self.rows = np.repeat(np.arange(num_rows), outputs_per_row)
        self.positions = torch.from_numpy(rng.integers(12, 40, len(self.rows)))
        tokens = torch.from_numpy(rng.integers(0, 30, (num_rows + 4, 48)).astype(np.int32))
        self.history = History(tokens, torch.from_numpy(rng.permutation(num_rows + 4)[:num_rows]))
        self.logits = torch.from_numpy((rng.standard_normal((len(self.rows), VOCAB)) * 2.5).astype(np.float32))

    @property
    def batch(self) -> SamplingBatch:
        return SamplingBatch.build(self.params, self.seeds, self.prompt_lens)

    def run(self, sampler: Sampler, device: str = "cpu") -> SampleOutput:
        given = self.history
        drafted = [None if part is None else part.to(device) for part in (given.common, given.drafted)]
        history = History(given.tokens.to(device), given.rows.to(device), *drafted)
        return sampler(self.logits.to(device), self.batch, self.rows, self.positions.to(device), history)


def windows(seed: int) -> tuple[Case, list[list[int]]]:
    """A case whose outputs stand on drafts: siblings at one position. Gives each output's drafts too."""
    case, rng = Case(seed, outputs_per_row=5), np.random.default_rng(seed)
    drafts = [rng.integers(0, 30, rng.integers(0, 5)).tolist() for _ in case.rows]
    table = np.full((len(drafts), 6), -1, np.int32)
    for row, ids in zip(table, drafts, strict=True):
        row[np.sort(rng.permutation(6)[: len(ids)])] = ids
    common = rng.integers(12, 40, len(KNOBS))[case.rows]
    case.positions = torch.from_numpy(common + [len(ids) - 1 for ids in drafts])
    case.history.common, case.history.drafted = torch.from_numpy(common), torch.from_numpy(table)
    return case, drafts
