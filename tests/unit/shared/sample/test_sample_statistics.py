"""The noise is random enough: chi-square against softmax, and the same test catches a sampler that is 2 % off."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.sample.interface import SamplingBatch
from shared.sample.sampler_numba import sample_cpu
from tests.support.oracles.chi_square import SMALLEST_P, p_value

VOCAB = 64
NUM_SEEDS = 500
NUM_POSITIONS = 2000
NUM_DRAWS = NUM_SEEDS * NUM_POSITIONS
LOGITS = torch.from_numpy(np.random.default_rng(12).normal(0, 1.2, VOCAB).astype(np.float32))


def draw(logits: torch.Tensor, seeds: npt.NDArray[np.uint64], **knobs: float) -> npt.NDArray[np.int64]:
    """(seeds, positions) ids."""
    params = [SamplingParams(max_tokens=1, **knobs)] * len(seeds)
    batch = SamplingBatch.build(params, seeds.tolist(), [1] * len(seeds))
    rows = np.repeat(np.arange(len(seeds)), NUM_POSITIONS)
    positions = torch.arange(NUM_POSITIONS).repeat(len(seeds))
    expanded = logits.expand(len(rows), VOCAB)
    return sample_cpu(expanded, batch, rows, positions, None).ids.numpy().reshape(len(seeds), NUM_POSITIONS)


def softmax(logits: torch.Tensor, temperature: float) -> npt.NDArray[np.float64]:
    return torch.softmax(logits.double() / temperature, dim=0).numpy()


def consecutive(num: int) -> npt.NDArray[np.uint64]:
    return np.arange(num, dtype=np.uint64)


def scattered(num: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(5).integers(0, 2**64, num, dtype=np.uint64)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("seeds", [consecutive, scattered])
def test_a_million_draws_follow_softmax(seeds: Callable[[int], npt.NDArray[np.uint64]], temperature: float) -> None:
    ids = draw(LOGITS, seeds(NUM_SEEDS), temperature=temperature)
    assert ids.size == NUM_DRAWS == 1_000_000
    assert p_value(np.bincount(ids.ravel(), minlength=VOCAB), softmax(LOGITS, temperature)) > SMALLEST_P


def test_a_sampler_two_percent_off_fails_the_same_test() -> None:
    """One draw of 50 is moved from the lower half of the ids to the upper one."""
    ids = draw(LOGITS, consecutive(NUM_SEEDS)).ravel()
    again = (np.arange(ids.size) % 50 == 0) & (ids < VOCAB // 2)
    ids = np.where(again, ids + VOCAB // 2, ids)
    assert p_value(np.bincount(ids, minlength=VOCAB), softmax(LOGITS, 1.0)) < SMALLEST_P


@pytest.mark.parametrize("lag", ["position", "seed"])
def test_neighbours_are_independent(lag: str) -> None:
    """Pairs of draws at neighbouring positions, and at the same position of neighbouring seeds."""
    ids = draw(torch.zeros(VOCAB), consecutive(NUM_SEEDS)) // 8  # 8 equal classes
    first, second = (ids[:, :-1], ids[:, 1:]) if lag == "position" else (ids[:-1], ids[1:])
    pairs = np.bincount((first * 8 + second).ravel(), minlength=64)
    assert p_value(pairs, np.full(64, 1 / 64)) > SMALLEST_P
