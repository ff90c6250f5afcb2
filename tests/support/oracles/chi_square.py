"""Chi-square tests of counts, without scipy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

SMALLEST_P = 1e-4


def p_value(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """Whether draws follow a distribution: the upper tail. Every expected count must be above 5."""
    return p_value_given(counts[None], probabilities[None])


def p_value_given(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """The same for several distributions at once, a row each: (contexts, outcomes)."""
    expected = probabilities * counts.sum(axis=1, keepdims=True)
    assert expected.min() > 5
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = torch.tensor(counts.shape[0] * (counts.shape[1] - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, torch.tensor(statistic / 2, dtype=torch.float64)))
