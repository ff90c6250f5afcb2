"""Define ScheduleBatch, the decoding rows in host arrays. Tokens go through the FutureMap (S11)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.core.request import Request
from shared.engine.plan import Bools, Int64s
from shared.sched.steps.lengths import Lengths


class ScheduleBatch:
    """All arrays have the order of `reqs`. `constrained`: those with a grammar.

    - seq_lens: committed length before the next step
    - expect_step: the step that wrote the row's relay
    - can_draft: whether the relay holds the drafter's state
    - in_flight: number of launched steps without a processed result
    - pending_tokens: with speculation, the most tokens that steps in flight can commit
    """

    def __init__(self) -> None:
        self._replace([], np.zeros(0, np.int64), np.zeros(0, np.bool_), Lengths(np.zeros(0, np.int64)))

    def _replace(self, reqs: list[Request], expect_step: Int64s, can_draft: Bools, seq_lens: Lengths) -> None:
        self.reqs = reqs
        self.constrained = [req for req in reqs if req.constraint is not None]
        self._index = {id(req): i for i, req in enumerate(reqs)}
        self.req_pool_indices = np.asarray([req.row for req in reqs], dtype=np.int64)
        self.expect_step = expect_step
        self.can_draft = can_draft
        self.seq_lens = seq_lens
        self.in_flight = np.zeros(len(reqs), dtype=np.int64)
        self._pending_advance = np.zeros(len(reqs), dtype=np.int64)
        self._pending_tokens = np.zeros(len(reqs), dtype=np.int64)

    @classmethod
    def of(cls, reqs: Sequence[Request], committed: Sequence[int], step: int, in_flight: int) -> ScheduleBatch:
        """Make a batch. Step `step` wrote the rows' relay. `in_flight`: 1 after a prompt's last chunk, else 0."""
        batch = cls()
        lengths = Lengths(np.asarray(committed, dtype=np.int64))
        batch._replace(list(reqs), np.full(len(reqs), step, np.int64), np.ones(len(reqs), np.bool_), lengths)
        batch.in_flight[:] = in_flight
        return batch

    def __len__(self) -> int:
        return len(self.reqs)

    def index_of(self, req: Request) -> int | None:
        return self._index.get(id(req))

    def prepare_for_decode(self, speculative: bool) -> None:
        if speculative:
            return
        self.seq_lens.advance(self._pending_advance)
        self._pending_advance = np.zeros(len(self), dtype=np.int64)

    def mark_planned(self, rows: Int64s, step: int, width: int, speculative: bool, drafts_next: bool = True) -> None:
        """Record that each of these rows advances by at most `width` tokens in `step`. `drafts_next`: the plan's.

        With speculation the upper bounds of the lengths advance now. Without it the lengths advance at
        the next `prepare_for_decode`.
        """
        self.expect_step = self.expect_step.copy()
        self.expect_step[rows] = step
        self.can_draft[rows] = drafts_next
        self.in_flight[rows] += 1
        if speculative:
            self._pending_tokens[rows] += width
            self.seq_lens.widen(rows, width)
        else:
            self._pending_advance[rows] = 1

    def on_processed(self, req: Request, committed: int, width: int, speculative: bool) -> None:
        """Record a result. `width` is 0 for a prompt's last chunk."""
        index = self.index_of(req)
        if index is None:
            return
        self.in_flight[index] -= 1
        if speculative:
            self._pending_tokens[index] -= width
            self.seq_lens.narrow(index, committed, int(self._pending_tokens[index]))

    def filter_batch(self, keep: Int64s) -> None:
        if len(keep) == len(self):
            return
        self.seq_lens.filter(keep)
        kept = (self.in_flight[keep], self._pending_advance[keep], self._pending_tokens[keep])
        self._replace([self.reqs[i] for i in keep], self.expect_step[keep], self.can_draft[keep], self.seq_lens)
        self.in_flight, self._pending_advance, self._pending_tokens = kept

    def merge_batch(self, other: ScheduleBatch) -> None:
        if not len(other):
            return
        self.seq_lens.merge(other.seq_lens)
        in_flight = np.concatenate([self.in_flight, other.in_flight])
        advance = np.concatenate([self._pending_advance, other._pending_advance])
        tokens = np.concatenate([self._pending_tokens, other._pending_tokens])
        expect_step = np.concatenate([self.expect_step, other.expect_step])
        can_draft = np.concatenate([self.can_draft, other.can_draft])
        self._replace(self.reqs + other.reqs, expect_step, can_draft, self.seq_lens)
        self.in_flight, self._pending_advance, self._pending_tokens = in_flight, advance, tokens
