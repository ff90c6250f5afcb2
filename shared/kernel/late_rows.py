"""Keep a draft head's inputs from plain steps until one pass writes their KV, by request-pool row, on a CPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.noise_numba import exact

Longs = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Taken:
    """T held tokens of N rows, row by row."""

    ids: torch.Tensor  # (T,) int64
    aux: torch.Tensor  # (T, A)
    positions: torch.Tensor  # (T,) int64
    cu_q_lens: npt.NDArray[np.int32]  # (N + 1,)


class LateRows:
    """Holds at most `most` successive tokens of each row. A gap drops the older tokens."""

    def __init__(self, num_rows: int, most: int, aux: torch.Tensor) -> None:
        """Compile the kernels. `aux` (T, A): an example, T at least 1."""
        self._size, self._dtype = aux.shape[1], aux.dtype
        self._ids = np.zeros((num_rows, most), np.int64)
        self._aux = np.zeros((num_rows, most, aux.shape[1] * aux.element_size()), np.uint8)
        # by row; an end is the position after the last token
        self._counts, self._ends = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._owners: list[Hashable] = [None] * num_rows
        row, zero = np.zeros(1, np.int64), torch.zeros(1, dtype=torch.int64)
        self.hold(row, [None], zero, zero, aux[:1])
        self.take(row, [None], zero + 1)

    def hold(
        self, rows: Longs, owners: Sequence[Hashable], positions: torch.Tensor, ids: torch.Tensor, aux: torch.Tensor
    ) -> bool:
        """Hold one token of each of N rows. Return whether a row is full, and must be taken now.

        rows, positions, ids (N,) int64; aux (N, A). A row's new owner begins without tokens.
        """
        self._forget_old_owners(rows, owners)
        held = self._ids, self._aux, self._counts, self._ends
        return bool(_hold(rows, positions.numpy(), ids.numpy(), _bytes_of(aux), *held))

    def take(self, rows: Longs, owners: Sequence[Hashable], lengths: torch.Tensor) -> Taken | None:
        """Return the tokens just before `lengths` (N,) of `rows` (N,), if any. Forget all tokens of these rows."""
        self._forget_old_owners(rows, owners)
        counts = np.where(self._ends[rows] == lengths.numpy(), self._counts[rows], 0)
        self._counts[rows] = 0
        bounds = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=bounds[1:])
        if not bounds[-1]:
            return None
        total = int(bounds[-1])
        ids, positions = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
        aux = torch.empty(total, self._size, dtype=self._dtype)
        _take(rows, counts, self._ids, self._aux, self._ends, ids.numpy(), _bytes_of(aux), positions.numpy())
        return Taken(ids, aux, positions, bounds)

    def _forget_old_owners(self, rows: Longs, owners: Sequence[Hashable]) -> None:
        for row, owner in zip(rows.tolist(), owners, strict=True):
            if self._owners[row] != owner:
                self._owners[row] = owner
                self._counts[row] = 0


def _bytes_of(values: torch.Tensor) -> Bytes:
    found: Bytes = values.contiguous().view(torch.uint8).numpy()
    return found


@exact
def _hold(
    rows: Longs,
    positions: Longs,
    ids: Longs,
    aux: Bytes,
    held_ids: Longs,
    held_aux: Bytes,
    counts: Longs,
    ends: Longs,
) -> bool:
    is_full = False
    for n in range(rows.shape[0]):
        row = rows[n]
        place = counts[row] if ends[row] == positions[n] and counts[row] < held_ids.shape[1] else 0
        held_ids[row, place] = ids[n]
        for i in range(aux.shape[1]):
            held_aux[row, place, i] = aux[n, i]
        counts[row], ends[row] = place + 1, positions[n] + 1
        is_full |= place + 1 == held_ids.shape[1]
    return is_full


@exact
def _take(
    rows: Longs,
    counts: Longs,
    held_ids: Longs,
    held_aux: Bytes,
    ends: Longs,
    ids: Longs,
    aux: Bytes,
    positions: Longs,
) -> None:
    t = 0
    for n in range(rows.shape[0]):
        for place in range(counts[n]):
            ids[t], positions[t] = held_ids[rows[n], place], ends[rows[n]] - counts[n] + place
            for i in range(aux.shape[1]):
                aux[t, i] = held_aux[rows[n], place, i]
            t += 1
