"""Look up drafts in the rows' own tokens on a CPU (shared/speculation/ngram.py defines them)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.sampling.noise_numba import exact

Longs = npt.NDArray[np.int64]
ALL_FIT = -1


def lookup_on_cpu(
    history: torch.Tensor, rows: torch.Tensor, last: torch.Tensor, longest: int, num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drafts (D, num_drafts) int64, and each row's number of matched tokens (D,) int64, at most `longest`.

    Row d's tokens are history[rows[d], : last[d] + 1], int32. Raises IndexError if the history lacks them."""
    drafts, lengths = np.empty((len(rows), num_drafts), np.int64), np.empty(len(rows), np.int64)
    wrong = copy_drafts(history.numpy(), rows.numpy(), last.numpy(), longest, drafts, lengths)
    if wrong != ALL_FIT:
        raise IndexError(f"token {int(last[wrong])} of row {int(rows[wrong])} is not in a history of {history.shape}")
    return torch.from_numpy(drafts), torch.from_numpy(lengths)


@exact
def copy_drafts(
    history: npt.NDArray[np.int32], rows: Longs, last: Longs, longest: int, drafts: Longs, lengths: Longs
) -> int:
    """Write the results. Return ALL_FIT, or the number of a row that is not in the history."""
    for d in range(rows.shape[0]):
        if not (0 <= rows[d] < history.shape[0] and 0 < last[d] < history.shape[1]):
            return d
        tokens = history[rows[d], : last[d] + 1]
        end, lengths[d] = _latest_match(tokens, longest)
        for i in range(drafts.shape[1]):
            drafts[d, i] = tokens[end + 1 + i % (last[d] - end)]
    return ALL_FIT


@exact
def _latest_match(tokens: npt.NDArray[np.int32], longest: int) -> tuple[int, int]:
    """Return the end and length of the longest match before the last token, of equal ones the latest.

    Without a match, return the last token but one, and 0.
    """
    last = tokens.shape[0] - 1
    best, best_end = 0, last - 1
    for end in range(last - 1, -1, -1):
        length = 0
        while length < longest and length <= end and tokens[end - length] == tokens[last - length]:
            length += 1
        if length > best:
            best, best_end = length, end
            if best == longest:
                break
    return best_end, best
