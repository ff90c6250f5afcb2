"""Find a step's rows that have encoder input."""

from __future__ import annotations

from shared.model.interface import ModelInputs


def encoder_rows(inputs: ModelInputs) -> list[tuple[int, int, int]]:
    """Return (row, first token, number of encoder tokens) for each row with encoder input.

    Raises ValueError if a step has only a part of an input, because all tokens of an input read each other.
    """
    assert inputs.encoder_lens is not None
    found = []
    starts, lens = inputs.cu_q_lens.tolist(), inputs.encoder_lens.tolist()
    for row, length in enumerate(lens):
        begin, end = starts[row], starts[row + 1]
        first = int(inputs.positions[begin]) if begin < end else length
        if first >= length:
            continue
        if first > 0 or end - begin < length:
            raise ValueError(f"row {row}: positions {first} to {first + end - begin - 1} of {length} encoder tokens")
        found.append((row, begin, length))
    return found
