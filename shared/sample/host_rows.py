"""Turns a CPU step's sampling parameters and masks into the torch sampler's form, for CPUs without numba."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.sample.interface import DeviceMasks, SamplingBatch, TokenMasks
from shared.sample.params import params_of
from shared.sample.sampler_torch import OutputRows


def output_rows(batch: SamplingBatch, row_of: npt.NDArray[np.int64], vocab_size: int) -> OutputRows:
    host = params_of(batch, vocab_size)
    params = {name: torch.from_numpy(values) for name, values in host.items()}
    return OutputRows(row_of, host, torch.from_numpy(row_of), params)


def mask_tensors(masks: TokenMasks | None) -> DeviceMasks | None:
    if masks is None or not (masks.rows >= 0).any():
        return None
    return DeviceMasks(torch.from_numpy(masks.rows), torch.from_numpy(masks.bits.view(np.int32)))
