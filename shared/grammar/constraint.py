"""Follows the grammar of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from shared.core.errors import BatonError, InvalidRequest, StepFailed


class GrammarConstraint:
    """A `shared.core.constraint.Constraint` for a grammar, owned by the request."""

    def __init__(self, compiled: Future[LLMatcher], eos_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._eos_ids = eos_ids
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0

    @property
    def is_ready(self) -> bool:
        return self._compiled.done()

    @property
    def error(self) -> BatonError | None:
        error = self._compiled.exception()
        if error is None or isinstance(error, BatonError):
            return error
        return StepFailed(f"compiling a grammar: {type(error).__name__}: {error}")

    def fill(
        self, emitted: Sequence[int], drafts: Sequence[int], parents: Sequence[int], out: npt.NDArray[np.uint32]
    ) -> None:
        try:
            self._fill(emitted, drafts, parents, out)
        except (BatonError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance's panics are not Exceptions, and must end only this request
            raise StepFailed(f"following a grammar: {type(error).__name__}: {error}") from error

    def cancel(self) -> None:
        self._compiled.cancel()

    def _fill(
        self, emitted: Sequence[int], drafts: Sequence[int], parents: Sequence[int], out: npt.NDArray[np.uint32]
    ) -> None:
        matcher = self._advanced(emitted)
        children: list[list[int]] = [[] for _ in out]
        for node, parent in enumerate(parents, start=1):
            children[parent].append(node)
        self._fill_below(matcher, 0, drafts, children, out)
        if matcher.is_error():
            raise _refused(matcher)

    def _advanced(self, emitted: Sequence[int]) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiled.result()
        matcher, new = self._matcher, list(emitted[self._num_consumed :])
        if new and not matcher.consume_tokens(new):
            raise _refused(matcher)
        self._num_consumed = len(emitted)
        return matcher

    def _fill_below(
        self,
        matcher: LLMatcher,
        node: int,
        drafts: Sequence[int],
        children: Sequence[Sequence[int]],
        out: npt.NDArray[np.uint32],
    ) -> None:
        """Fill the masks of a draft tree's node and of all nodes below it.

        The matcher is at this node before and after the call.
        """
        row = out[node]
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        for child in children[node]:
            token = drafts[child - 1]
            if token not in self._eos_ids and matcher.try_consume_tokens([token]):
                self._fill_below(matcher, child, drafts, children, out)
                matcher.rollback(1)


def _refused(matcher: LLMatcher) -> InvalidRequest:
    return InvalidRequest(f"the answer can't follow its grammar: {matcher.get_error()[:500]}")
