"""The hash and the arithmetic of the noise: one definition, three implementations, finite at both ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numba import njit

from shared.kernel.sampling import noise, noise_numba
from shared.kernel.sampling.sample_cpu import may_reach, reach_of

SEEDS = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
POSITIONS = [0, 1, 2, 4095, 131071, 2**31 - 1]
IDS = [0, 1, 2, 95, 49151, 262143]
LAST = 2**noise.NOISE_BITS - 1
GOLDEN_KEYS = (826600560, 1263553795)
GOLDEN_BITS = [2351109, 823338, 426497]


@njit(cache=True)
def numba_values(values: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    logs, exps = np.empty_like(values), np.empty_like(values)
    weights, gumbels = np.empty(len(values), np.int64), np.empty(len(bits), np.float32)
    for i in range(len(values)):
        logs[i] = noise_numba.nb_log(values[i])
        exps[i] = noise_numba.nb_exp(-values[i])
        weights[i] = noise_numba.nb_weight(-values[i])
    for i in range(len(bits)):
        gumbels[i] = noise_numba.nb_gumbel(bits[i])
    return logs, exps, weights, gumbels


@njit
def num_reaching(noise: np.float32) -> tuple[int, int]:
    """Return how many of all noises are at least `noise`, and how many `may_reach` lets pass."""
    reaching = may = 0
    for i in range(LAST + 1):
        reaching += noise_numba.nb_gumbel(np.int32(i)) >= noise
        may += may_reach(reach_of(noise), np.int32(i))
    return reaching, may


@njit
def num_reaching_themselves() -> int:
    may = 0
    for i in range(LAST + 1):
        may += may_reach(reach_of(noise_numba.nb_gumbel(np.int32(i))), np.int32(i))
    return may


def signed(seed: int) -> int:
    return seed - 2**64 if seed >> 63 else seed


def test_the_hash_is_the_same_in_python_numba_and_torch() -> None:
    ids = torch.tensor(IDS, dtype=torch.int32)
    for seed in SEEDS:
        for position in POSITIONS:
            keys = noise.row_keys(seed, position)
            assert tuple(map(int, noise_numba.nb_row_keys(np.uint64(seed), position))) == keys
            on_torch = noise.torch_row_keys(torch.tensor([signed(seed)]), torch.tensor([position]))
            assert tuple(int(key) & noise.MASK32 for key in on_torch) == keys
            expected = [noise.noise_bits(*keys, i) for i in IDS]
            assert [int(noise_numba.nb_noise_bits(*map(np.uint32, keys), i)) for i in IDS] == expected
            assert noise.torch_noise_bits(on_torch[0][:, None], on_torch[1][:, None], ids)[0].tolist() == expected


def test_the_hash_never_changes() -> None:
    """The numerics version of the fingerprint stands for these values: change both or none."""
    assert noise.row_keys(0x123456789ABCDEF0, 77) == GOLDEN_KEYS
    assert [noise.noise_bits(*GOLDEN_KEYS, i) for i in (0, 1, 49151)] == GOLDEN_BITS


def test_every_part_of_the_seed_and_the_position_matter() -> None:
    base = noise.row_keys(5, 9)
    for bit in range(64):
        assert noise.row_keys(5 ^ (1 << bit), 9) != base
    for bit in range(31):
        assert noise.row_keys(5, 9 ^ (1 << bit)) != base


def test_arithmetic_has_the_same_bits_in_numba_and_torch() -> None:
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.random(20000) * 80, rng.random(20000) * 1e-6, [1.0, 0.5, 2.0, 6e-8]])
    values = np.maximum(values, 1e-30).astype(np.float32)
    bits = rng.integers(0, LAST + 1, 40000).astype(np.int32)
    logs, exps, weights, gumbels = numba_values(values, bits)
    on_torch = torch.from_numpy(values)
    assert np.array_equal(logs, noise.torch_log(on_torch).numpy())
    assert np.array_equal(exps, noise.torch_exp(-on_torch).numpy())
    assert np.array_equal(weights, noise.torch_weight(-on_torch).numpy())
    assert np.array_equal(gumbels, noise.torch_gumbel(torch.from_numpy(bits)).numpy())


def test_arithmetic_is_as_good_as_a_library() -> None:
    values = np.random.default_rng(4).uniform(1e-7, 30, 20000).astype(np.float32)
    logs, exps, weights, _ = numba_values(values, np.zeros(1, np.int32))
    exact = values.astype(np.float64)
    assert np.max(np.abs(logs - np.log(exact)) / np.maximum(np.abs(np.log(exact)), 1e-3)) < 2.5e-7
    assert np.max(np.abs(exps / np.exp(-exact) - 1)) < 2.5e-7
    assert np.all(weights == np.floor(exps.astype(np.float64) * 2**noise.WEIGHT_BITS))


def test_noise_is_finite_over_the_whole_range_and_never_falls() -> None:
    bits = torch.cat([torch.arange(0, LAST, 1009), torch.arange(LAST - 5000, LAST + 1), torch.arange(5000)]).unique()
    gumbels = noise.torch_gumbel(bits.to(torch.int32))
    assert gumbels.isfinite().all() and (gumbels.diff() >= 0).all()
    assert float(gumbels[0]) == pytest.approx(-math.log(-math.log(0.5 / 2**23)), abs=1e-6)
    assert float(gumbels[-1]) == pytest.approx(-math.log(-math.log1p(-0.5 / 2**23)), abs=1e-5)


def test_no_noise_that_reaches_is_passed_over() -> None:
    assert num_reaching_themselves() == LAST + 1


@pytest.mark.parametrize("wanted", [3.0, 7.0, 12.0])
def test_nearly_all_noise_that_does_not_reach_is_passed_over(wanted: float) -> None:
    """The chord gives away 6 % at most, the margin 1 %, and 1 - u instead of -log(u) 3 % at a noise of 3."""
    reaching, may = num_reaching(np.float32(wanted))
    assert 0 < reaching <= may < 1.13 * reaching + 2
