"""Which rows of a step bring an encoder's input, and that they bring all of it. For models with an encoder."""

from __future__ import annotations

import torch

from shared.model.interface import ModelInputs


def encoder_rows(inputs: ModelInputs) -> list[tuple[int, int, int]]:
    """(row, its first token, encoder tokens) of each. Raises where an input was cut: its tokens read one another."""
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


def is_decoder(inputs: ModelInputs, token_rows: torch.Tensor) -> torch.Tensor:
    """(T,) bool, of the tokens that the decoder reads; token_rows (T,): whose they are."""
    assert inputs.encoder_lens is not None
    return inputs.positions >= inputs.encoder_lens[token_rows]
