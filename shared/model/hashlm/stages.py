"""HashLM in two pipeline stages, one per layer: the lower sums travel from the first to the second, and nothing else.

    stage 0    ids, kv0     ->  s (T,)                      stage 1    s, kv1  ->  h, logits

A layer is one function of what it is given at each token: it stores mix(given, position) and sums what lies behind. So
stage 1 needs neither ids nor kv0, as a process of its own with its own half of the pages would not have them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.noise import exact
from shared.kv.pool import KVPool
from shared.model.hashlm.model import HashLM, mix, odd_weight
from shared.model.interface import Carried, ModelInputs, ModelOutput, Stage

_u64 = np.uint64
Sums = npt.NDArray[np.uint64]


@exact
def _layer_row(
    given: Sums, positions: npt.NDArray[np.int64], pages: npt.NDArray[np.int32], kv: Sums, window: int, out: Sums
) -> None:
    """One row's tokens, positions ascending; kv is (num_pages, page_size)."""
    page_size, total, begin, end = kv.shape[1], _u64(0), np.int64(0), np.int64(0)  # total is over [begin, end)
    for t in range(given.shape[0]):
        position = positions[t]
        kv[pages[position // page_size], position % page_size] = mix(given[t], position)
        first = max(np.int64(0), position - window + 1) if window > 0 else np.int64(0)
        if first > begin:
            total, begin, end = _u64(0), first, first
        for j in range(end, position + 1):
            total += kv[pages[j // page_size], j % page_size] * odd_weight(j)
        out[t], end = total, position + 1


@exact
def _layer_window(
    given: Sums,
    positions: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    visible: npt.NDArray[np.int64],
    pages: npt.NDArray[np.int32],
    kv: Sums,
    out: Sums,
) -> None:
    """One row's window of alternatives, as in `hashlm`."""
    page_size, first, before = kv.shape[1], slots[0], _u64(0)
    while visible[0] >> (slots[0] - first + 1) != 0:
        first -= 1
    for j in range(first):
        before += kv[pages[j // page_size], j % page_size] * odd_weight(j)
    for t in range(given.shape[0]):
        total, position = before, first
        kv[pages[slots[t] // page_size], slots[t] % page_size] = mix(given[t], positions[t])
        for slot in range(first, slots[t] + 1):
            if (visible[t] >> (slot - first)) & 1:
                total += kv[pages[slot // page_size], slot % page_size] * odd_weight(position)
                position += 1
        out[t] = total


@exact
def _layer(
    given: Sums,
    positions: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    visible: npt.NDArray[np.int64],
    cu_q_lens: npt.NDArray[np.int32],
    page_table: npt.NDArray[np.int32],
    kv: Sums,
    window: int,
    out: Sums,
) -> None:
    for row in range(cu_q_lens.shape[0] - 1):
        begin, end = cu_q_lens[row], cu_q_lens[row + 1]
        own, pages, sums = given[begin:end], page_table[row], out[begin:end]
        if begin < end and visible[begin] >= 0:
            nodes = slots[begin:end]
            _layer_window(own, positions[begin:end], nodes, visible[begin:end], pages, kv, sums)
        else:
            _layer_row(own, positions[begin:end], pages, kv, window, sums)


def run_layer(inputs: ModelInputs, given: torch.Tensor, kv: Sums, window: int) -> torch.Tensor:
    """given (T,) int64, kv (num_pages, page_size) of one layer -> its sums (T,) int64."""
    positions, out = inputs.positions.contiguous().numpy(), torch.zeros_like(given)
    _layer(
        given.contiguous().numpy().view(np.uint64),
        positions,
        positions if inputs.slots is None else inputs.slots.contiguous().numpy(),
        np.full_like(positions, -1) if inputs.visible is None else inputs.visible.contiguous().numpy(),
        inputs.cu_q_lens.contiguous().numpy(),
        inputs.page_table.contiguous().numpy(),
        kv,
        window,
        out.numpy().view(np.uint64),
    )
    return out


def split(model: HashLM) -> tuple[Stage, Stage]:
    """Its two stages, in order. Each reads and writes its own layer of the plane "kv" only."""

    def layer(kv: KVPool, index: int) -> Sums:
        return kv.plane("kv").numpy().view(np.uint64)[:, index]

    def lower(inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried:
        return Carried(run_layer(inputs, model.salted(inputs), layer(kv, 0), model.window))

    def upper(inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> ModelOutput:
        assert carried is not None
        sums = run_layer(inputs, carried.values, layer(kv, 1), model.window)
        states = sums[inputs.logits_idx]
        return ModelOutput(
            logits=model.logits_of(states.numpy().view(np.uint64)),
            hidden=states.unsqueeze(1),
            aux=torch.stack([carried.values, sums, inputs.positions], dim=1),
        )

    return lower, upper
