"""Look up drafts in the rows' own tokens on a CPU (shared/speculation/ngram.py defines them)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.kernel.noise_numba import exact

Longs = npt.NDArray[np.int64]
ALL_FIT = -1


@exact
def copy_drafts(
    history: npt.NDArray[np.int32], rows: Longs, last: Longs, longest: int, drafts: Longs, lengths: Longs
) -> int:
    """Write each row's drafts (D, n), and the length (D,) of its match, at most `longest`.

    Row d's tokens are history[rows[d], : last[d] + 1]. Return ALL_FIT, or the number of a row that is not in the
    history.
    """
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
