"""What a request's next token may be. The scheduler's face of a grammar; shared/grammar has what is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.core.errors import BatonError


class Constraint(Protocol):
    """Of one sequence. What it allows is a function of its grammar and of the tokens that the sequence has emitted."""

    @property
    def is_ready(self) -> bool:
        """Whether the grammar has been compiled, or can't be."""
        ...

    @property
    def error(self) -> BatonError | None:
        """Why the grammar can't be compiled. Asked once it is ready."""
        ...

    def cancel(self) -> None:
        """The request is over."""
        ...

    def fill(
        self, emitted: Sequence[int], drafts: Sequence[int], parents: Sequence[int], out: npt.NDArray[np.uint32]
    ) -> None:
        """Write which ids may follow: behind `emitted` into out[0], and behind each draft into out[1 + its index].

        `emitted` begins with all that earlier calls had. parents[i] is the node that drafts[i] follows, 0 for the
        emitted tokens themselves, else 1 + the index of a draft before it. What follows a draft that is not allowed is
        left as it is. out (1 + len(drafts), words) has a bit for each id, the lowest first. Raises BatonError when the
        emitted tokens do not follow the grammar, or it became too complex.
        """
        ...
