"""HashLM on several ranks. A stored value has four lanes of 16 bits, and a rank has some of them, as it has some of a
Llama's KV heads:

    page:   [kv0, kv1][slot][lane 0 | lane 1 | lane 2 | lane 3]      rank 0 of 2 has lanes 0 and 1, rank 1 the others

Sums wrap at 64 bits, so the ranks' partial sums (each over the lanes that it has stored, and reads through the page
table) add up to exactly what one rank would have summed. Two meetings per step: after each layer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.core.errors import ConfigError
from shared.device.group import RankGroup
from shared.kernel.noise import exact
from shared.kv.pool import KVPool
from shared.model.hashlm.model import HashLM, mix, odd_weight
from shared.model.interface import AdapterSpec, ModelInputs, ModelOutput

NUM_LANES = 4
LANE_BITS = 16

_u64 = np.uint64
Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Lanes = npt.NDArray[np.uint16]  # one layer of a pool: (num_pages, page_size, lanes of this rank)


@exact
def _read(lanes: Lanes, page: int, slot: int, first: int) -> np.uint64:
    """What this rank has of a value: the other lanes are 0."""
    value = _u64(0)
    for lane in range(lanes.shape[2]):
        value |= _u64(lanes[page, slot, lane]) << _u64(LANE_BITS * (first + lane))
    return value


@exact
def _write(lanes: Lanes, page: int, slot: int, first: int, value: np.uint64) -> None:
    for lane in range(lanes.shape[2]):
        lanes[page, slot, lane] = np.uint16((value >> _u64(LANE_BITS * (first + lane))) & _u64(0xFFFF))


@exact
def _sum_row(positions: Longs, pages: npt.NDArray[np.int32], lanes: Lanes, first: int, sums: Words) -> None:
    """One row's tokens, positions ascending: each sums 0 .. its own."""
    page_size = lanes.shape[1]
    total, reached = _u64(0), -1
    for t in range(positions.shape[0]):
        for j in range(reached + 1, positions[t] + 1):
            total += _read(lanes, pages[j // page_size], j % page_size, first) * odd_weight(j)
        sums[t], reached = total, positions[t]


@exact
def _sum_window(
    positions: Longs,
    slots: Longs,
    visible: Longs,
    pages: npt.NDArray[np.int32],
    lanes: Lanes,
    first: int,
    sums: Words,
) -> None:
    """One row's window of alternatives: the slots before it, the node's ancestors in it, and the node itself."""
    page_size = lanes.shape[1]
    begin = slots[0]
    while visible[0] >> (slots[0] - begin + 1) != 0:
        begin -= 1
    before = _u64(0)
    for j in range(begin):
        before += _read(lanes, pages[j // page_size], j % page_size, first) * odd_weight(j)
    for t in range(positions.shape[0]):
        total, position = before, begin
        for slot in range(begin, slots[t]):
            if (visible[t] >> (slot - begin)) & 1:
                total += _read(lanes, pages[slot // page_size], slot % page_size, first) * odd_weight(position)
                position += 1
        own = _read(lanes, pages[slots[t] // page_size], slots[t] % page_size, first)
        sums[t] = total + own * odd_weight(positions[t])


@exact
def _layer(
    values: Words,
    positions: Longs,
    slots: Longs,
    visible: Longs,
    cu_q_lens: npt.NDArray[np.int32],
    page_table: npt.NDArray[np.int32],
    lanes: Lanes,
    first: int,
    sums: Words,
) -> None:
    """Every token stores its value, then sums what it may read."""
    page_size = lanes.shape[1]
    for row in range(cu_q_lens.shape[0] - 1):
        begin, end = cu_q_lens[row], cu_q_lens[row + 1]
        pages = page_table[row]
        for t in range(begin, end):
            _write(lanes, pages[slots[t] // page_size], slots[t] % page_size, first, values[t])
        at, own, out = positions[begin:end], slots[begin:end], sums[begin:end]
        if begin < end and visible[begin] >= 0:
            _sum_window(at, own, visible[begin:end], pages, lanes, first, out)
        else:
            _sum_row(at, pages, lanes, first, out)


@exact
def _mix_all(values: Words, positions: Longs, out: Words) -> None:
    for t in range(values.shape[0]):
        out[t] = mix(values[t], positions[t])


class HashLMShard(HashLM):
    """A HashLM to everybody else: same pages, same logits, on every rank."""

    def __init__(self, group: RankGroup, max_context: int = 0, adapters: tuple[AdapterSpec, ...] = ()) -> None:
        super().__init__(max_context=max_context, adapters=adapters)
        if NUM_LANES % group.size:
            raise ConfigError(
                f"--tp {group.size}: hashlm has {NUM_LANES} lanes, which so many ranks can't share evenly"
            )
        self._group = group
        self._num_lanes = NUM_LANES // group.size
        self._first = group.rank * self._num_lanes

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """As HashLM.forward. Together with the other ranks' forward of the same inputs."""
        positions = inputs.positions.contiguous().numpy()
        lower = self._run(0, self._mixed(self.salted(inputs).contiguous().numpy(), positions), inputs, kv)
        upper = self._run(1, self._mixed(lower.view(np.int64), positions), inputs, kv)
        wanted = np.ascontiguousarray(upper[inputs.logits_idx.numpy()])
        states = torch.from_numpy(np.stack([lower, upper], axis=1).view(np.int64))
        return ModelOutput(
            logits=self.logits_of(wanted),
            hidden=torch.from_numpy(wanted.view(np.int64)[:, None]),
            aux=torch.cat([states, inputs.positions.unsqueeze(1)], dim=1),
        )

    def _mixed(self, values: Longs, positions: Longs) -> Words:
        out = np.empty(len(values), np.uint64)
        _mix_all(values.view(np.uint64), positions, out)
        return out

    def _run(self, layer: int, values: Words, inputs: ModelInputs, kv: KVPool) -> Words:
        """(T,) sums of one layer over all lanes."""
        positions = inputs.positions.contiguous().numpy()
        sums = np.zeros(len(positions), np.uint64)
        _layer(
            values,
            positions,
            positions if inputs.slots is None else inputs.slots.contiguous().numpy(),
            np.full_like(positions, -1) if inputs.visible is None else inputs.visible.contiguous().numpy(),
            inputs.cu_q_lens.contiguous().numpy(),
            inputs.page_table.contiguous().numpy(),
            self._own_lanes(kv, layer),
            self._first,
            sums,
        )
        partial: Words = self._group.stack(torch.from_numpy(sums.view(np.int64))).numpy().view(np.uint64)
        total: Words = partial.sum(axis=0, dtype=np.uint64)
        return total

    def _own_lanes(self, kv: KVPool, layer: int) -> Lanes:
        """A view of the pool: least significant lane first, as the machine stores an integer."""
        words = kv.plane("kv").numpy()[:, layer]
        lanes: Lanes = words.view(np.uint16).reshape(*words.shape, NUM_LANES)
        return lanes[..., self._first : self._first + self._num_lanes]
