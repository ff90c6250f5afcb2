"""Follows the grammar of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from shared.core.constraint import Forced
from shared.core.errors import BatonError, InvalidRequest, StepFailed

FADE = 0.9  # of `cost_s`, with each mask: a grammar whose masks were slow once may soon have slow ones again
NO_TOKENS = -1
NO_EXTENSION = "NoExtension"  # llguidance's word for an empty mask

Mask = npt.NDArray[np.uint32]
Start = Callable[[Callable[[], None], bool], Future[None]]


class GrammarConstraint:
    """A `shared.core.constraint.Constraint` for a grammar, owned by the request.

    A thread of `start` has the matcher while `is_ready` is false, and the loop's thread has it otherwise.
    """

    def __init__(
        self,
        compile: Callable[[], LLMatcher],
        num_words: int,
        eos_ids: frozenset[int],
        start: Start,
        clock: Callable[[], float],
    ) -> None:
        """`start` runs a function on another thread; its bool says whether the function compiles.

        `clock` tells the calling thread's own seconds.
        """
        self.cost_s = 0.0
        self.forced = Forced(0, ())
        self._compile = compile
        self._num_words = num_words
        self._eos_ids = eos_ids
        self._start = start
        self._clock = clock
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._job = Future[None]()
        self._num_asked = NO_TOKENS  # the number of emitted tokens at the newest `prepare`
        self._prepared = np.zeros(num_words, np.uint32)

    @property
    def is_ready(self) -> bool:
        return self._job.done()

    @property
    def error(self) -> BatonError | None:
        error = self._job.exception()
        if error is None or isinstance(error, BatonError):
            return error
        return StepFailed(f"compiling a grammar: {type(error).__name__}: {error}")

    def prepare(self, emitted: Sequence[int]) -> None:
        if self._num_asked != len(emitted):
            self._num_asked = len(emitted)
            ids = tuple(emitted)  # the request's own list may grow
            self._job = self._start(lambda: self._prepare(ids), self._matcher is None)

    def is_prepared(self, emitted: Sequence[int]) -> bool:
        return self._num_asked == len(emitted) and self.is_ready and self.error is None

    def _prepare(self, emitted: Sequence[int]) -> None:
        if self._matcher is None:
            self._matcher = self._compile()
        out = np.zeros((1, self._num_words), np.uint32)
        self._guarded_fill(emitted, (), (), out, looks_ahead=True)
        self._prepared = out[0]

    def fill(self, emitted: Sequence[int], drafts: Sequence[int], parents: Sequence[int], out: Mask) -> None:
        if len(out) == 1 and self.is_prepared(emitted):
            out[0] = self._prepared
        else:
            self._guarded_fill(emitted, drafts, parents, out, looks_ahead=bool(drafts))  # the next step may draft, too

    def cancel(self) -> None:
        self._job.cancel()

    def _guarded_fill(
        self, emitted: Sequence[int], drafts: Sequence[int], parents: Sequence[int], out: Mask, *, looks_ahead: bool
    ) -> None:
        try:
            self._fill(emitted, drafts, parents, out, looks_ahead)
        except (BatonError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance's panics are not Exceptions, and must end only this request
            raise StepFailed(f"following a grammar: {type(error).__name__}: {error}") from error

    def _fill(
        self, emitted: Sequence[int], drafts: Sequence[int], parents: Sequence[int], out: Mask, looks_ahead: bool
    ) -> None:
        matcher = self._advanced(emitted)
        children: list[list[int]] = [[] for _ in out]
        for node, parent in enumerate(parents, start=1):
            children[parent].append(node)
        began = self._clock()  # behind the emitted tokens: after a resume these are many, once
        self._fill_below(matcher, 0, drafts, children, out)
        if matcher.is_error():
            raise _refused(matcher)
        if looks_ahead:
            self.forced = Forced(len(emitted), matcher.compute_ff_tokens())
        self.cost_s = max(self._clock() - began, FADE * self.cost_s)

    def _advanced(self, emitted: Sequence[int]) -> LLMatcher:
        matcher, new = self._matcher, list(emitted[self._num_consumed :])
        assert matcher is not None, "masks come after the compilation"
        if new and not matcher.consume_tokens(new):
            raise _refused(matcher)
        self._num_consumed = len(emitted)
        return matcher

    def _fill_below(
        self, matcher: LLMatcher, node: int, drafts: Sequence[int], children: Sequence[Sequence[int]], out: Mask
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
    why = matcher.get_error()
    if why.startswith(NO_EXTENSION):
        why = "this model has no token for what comes next there"
    return InvalidRequest(f"the answer can't follow its grammar: {why[:500]}")
