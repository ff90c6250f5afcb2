"""The interface of a grammar for the scheduler, implemented in shared/grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.core.errors import BatonError


class Constraint(Protocol):
    @property
    def is_ready(self) -> bool:
        """Return whether the grammar's compilation has ended, successfully or not."""
        ...

    @property
    def error(self) -> BatonError | None:
        """Return the error of a failed compilation, else None. Valid once `is_ready`."""
        ...

    def cancel(self) -> None: ...

    def fill(
        self, emitted: Sequence[int], drafts: Sequence[int], parents: Sequence[int], out: npt.NDArray[np.uint32]
    ) -> None:
        """Write the ids allowed after `emitted` into out[0], and the ids allowed after drafts[i] into out[1 + i].

        `emitted`: all tokens so far. parents[i] is 0 if drafts[i] follows `emitted`, else 1 + the index of the draft
        that drafts[i] follows. If a draft is disallowed, or is an EOS token, its row and its descendants' rows stay
        unwritten. `out` has the shape (1 + len(drafts), words), with one bit per id, the lowest id first. Raises
        BatonError if the tokens break the grammar, or if the grammar became too complex.
        """
        ...
