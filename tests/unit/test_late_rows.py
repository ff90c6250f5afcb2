"""What plain steps leave for a head is held back by row, in order, and never given to a row's next owner."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.kernel.late_rows import LateRows, Taken

MOST, SIZE = 4, 3
NUM_ROWS = 5


def features(positions: list[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.tensor(positions).unsqueeze(1) + torch.arange(SIZE) / 4).to(dtype)


class Held:
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype
        self._rows = LateRows(NUM_ROWS, MOST, features([0], dtype))

    def hold(self, rows: list[int], positions: list[int], owners: str = "abcde") -> bool:
        """The token at a position has the position's id plus 100."""
        ids = torch.tensor(positions) + 100
        aux = features(positions, self._dtype)
        return self._rows.hold(np.array(rows), [owners[row] for row in rows], torch.tensor(positions), ids, aux)

    def take(self, rows: list[int], lengths: list[int], owners: str = "abcde") -> list[list[int]]:
        """Each row's positions; ids and features are checked."""
        taken = self._rows.take(np.array(rows), [owners[row] for row in rows], torch.tensor(lengths))
        if taken is None:
            return [[] for _ in rows]
        self._check(taken)
        return [part.tolist() for part in np.split(taken.positions.numpy(), taken.cu_q_lens[1:-1])]

    def _check(self, taken: Taken) -> None:
        positions = taken.positions.tolist()
        assert taken.ids.tolist() == [position + 100 for position in positions]
        assert torch.equal(taken.aux, features(positions, self._dtype))
        assert taken.cu_q_lens[-1] == len(positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_tokens_come_back_once_in_order(dtype: torch.dtype) -> None:
    held = Held(dtype)
    assert not held.hold([3, 1], [10, 20]) and not held.hold([1, 3], [21, 11])
    assert not held.hold([3], [12])
    assert held.take([1, 3, 0], [22, 13, 7]) == [[20, 21], [10, 11, 12], []]
    assert held.take([1, 3], [22, 13]) == [[], []]


def test_the_last_place_is_told() -> None:
    held = Held()
    assert [held.hold([2, 4], [n, 50 + n]) for n in range(MOST)] == [False] * (MOST - 1) + [True]
    assert held.take([4, 2], [50 + MOST, MOST]) == [list(range(50, 50 + MOST)), list(range(MOST))]


def test_a_gap_drops_the_older_tokens() -> None:
    held = Held()
    held.hold([0], [5])
    held.hold([0], [7])
    assert held.take([0], [8]) == [[7]]
    held.hold([0], [8])
    assert held.take([0], [10]) == [[]], "a token at 9 was committed without being held"
    assert held.take([0], [9]) == [[]]


def test_a_new_owner_gets_nothing_of_the_old_one() -> None:
    """Even where it goes on at the same position."""
    held = Held()
    held.hold([0, 1], [5, 5])
    held.hold([0], [6], owners="z")
    assert held.take([0, 1], [7, 6], owners="zy") == [[6], []]


def test_a_full_row_that_was_not_taken_begins_anew() -> None:
    held = Held()
    for n in range(MOST + 1):
        held.hold([0], [n])
    assert held.take([0], [MOST + 1]) == [[MOST]]
