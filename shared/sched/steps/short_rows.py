"""Keep rows from growing beyond a model's short context, because longer texts have other KV.

    committed + width <= short_context      the row steps like any other
    a step of the row is in flight          it waits for the result, which says how long the row is
    committed < short_context               it takes no drafts, so it grows by one token
    committed == short_context              it has the first token beyond: all of it is computed again

So no token beyond the short context is ever computed with the KV of a short text, except drafts that are not taken.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from shared.core.page_identity import LONG
from shared.core.request import Request, RequestState
from shared.sched.steps.batch import ScheduleBatch


class NearBound(NamedTuple):
    """Rows that sit the next step out, that take no drafts in it, and that are computed again."""

    waiting: Set[Request] = frozenset()
    narrow: Set[Request] = frozenset()
    outgrown: Sequence[Request] = ()


def rows_near(short_context: int, batch: ScheduleBatch, width: int) -> NearBound:
    """`short_context`: as in ModelSpec, 0: none. `width`: the most tokens that a row may commit in the next step."""
    if not short_context:
        return NearBound()
    waiting: set[Request] = set()
    narrow: set[Request] = set()
    outgrown: list[Request] = []
    for index in np.flatnonzero(batch.seq_lens.hi + width > short_context):
        req = batch.reqs[index]
        if req.ask.adapter == LONG or req.state is not RequestState.RUNNING:
            continue
        if batch.in_flight[index]:
            waiting.add(req)
        elif batch.seq_lens.hi[index] < short_context:
            narrow.add(req)
        else:
            outgrown.append(req)
    return NearBound(waiting, narrow, outgrown)
