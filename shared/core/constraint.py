"""The interface of a grammar for the scheduler, implemented in shared/grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shared.core.errors import BatonError


class Forced(NamedTuple):
    """The only tokens that a grammar allows after `num_emitted` tokens, in order."""

    num_emitted: int
    ids: Sequence[int]


class Constraint(Protocol):
    cost_s: float  # what the masks and forced tokens of a step cost the loop, by the newest ones
    forced: Forced

    @property
    def is_ready(self) -> bool:
        """Return whether the newest `prepare` has ended, successfully or not. Call `fill` only then."""
        ...

    @property
    def error(self) -> BatonError | None:
        """Return the error of a failed `prepare`, else None. Valid once `is_ready`."""
        ...

    def cancel(self) -> None: ...

    def prepare(self, emitted: Sequence[int]) -> None:
        """Begin to make the mask after `emitted` on another thread, unless that has begun.

        The first call also compiles the grammar. `Grammars.constraint` makes this call.
        """
        ...

    def is_prepared(self, emitted: Sequence[int]) -> bool:
        """Return whether the mask after `emitted` is made, so that `fill` without drafts only copies it."""
        ...

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
