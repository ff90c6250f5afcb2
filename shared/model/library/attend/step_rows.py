"""Which rows of a step attend together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shared.kernel.attention.attention import MOST_PADDING, PADDED_MAX_Q, AttentionInputs

MOST_KEYS = 1 << 17  # of rows that attend together: keys and values are gathered


@dataclass(frozen=True, slots=True)
class StepRows:
    """Neighbouring rows with equally many tokens, which attend together: tokens [start, stop) of the step.

    With them, the rows have `lengths` tokens."""

    first: int  # number of the first row
    start: int
    stop: int
    lengths: tuple[int, ...]

    @property
    def num_queries(self) -> int:
        """Return the number of tokens per row."""
        return (self.stop - self.start) // len(self.lengths)

    def split(self, most: int) -> list[StepRows]:
        """Return parts of at most `most` tokens, or one each. Several rows, which have few tokens, stay together."""
        most = max(1, most)
        if len(self.lengths) > 1 or self.num_queries <= most:
            return [self]
        bounds = [*range(self.start, self.stop, most), self.stop]
        return [
            StepRows(self.first, start, stop, (self.lengths[0] - (self.stop - stop),))
            for start, stop in itertools.pairwise(bounds)
        ]


def rows_of(inputs: AttentionInputs) -> list[StepRows]:
    """Return the rows that have tokens."""
    return joined_rows(*host_lengths(inputs))


def joined_rows(bounds: Sequence[int], befores: Sequence[int]) -> list[StepRows]:
    """`bounds`: of the rows' tokens. `befores`: how many tokens each row has before the step."""
    found: list[StepRows] = []
    for number, ((start, stop), before) in enumerate(zip(itertools.pairwise(bounds), befores, strict=True)):
        if stop > start:
            one = StepRows(number, start, stop, (before + stop - start,))
            joined = join(found[-1], one) if found else None
            found[-1:] = [joined] if joined is not None else [*found[-1:], one]
    return found


def host_lengths(inputs: AttentionInputs) -> tuple[list[int], list[int]]:
    """Return the bounds of the rows' tokens, and the rows' numbers of tokens before the step."""
    host = inputs.layout.host
    if host is not None and host.seq_lens is not None:
        return host.cu_q_lens.tolist(), host.seq_lens.tolist()
    # All arrays are in host memory, and a row's first token has the first slot behind the others.
    bounds = inputs.layout.cu_q_lens.tolist()
    slots = inputs.key_slots.tolist()
    return bounds, [slots[start] if stop > start else 0 for start, stop in itertools.pairwise(bounds)]


def join(rows: StepRows, row: StepRows) -> StepRows | None:
    """Return both, or None if they differ in their tokens, are chunks, or would be padded much."""
    lengths = rows.lengths + row.lengths
    fits = rows.num_queries == row.num_queries <= PADDED_MAX_Q and rows.first + len(rows.lengths) == row.first
    num_keys = max(lengths) * len(lengths)
    if not fits or num_keys > min(MOST_KEYS, MOST_PADDING * sum(lengths)):
        return None
    return StepRows(rows.first, rows.start, row.stop, lengths)
