"""Keep rows with slow masks out of steps until their masks are made. So no other row waits for them.

cheap masks   the loop makes them while the step runs, as many as take SHARE of its time together
others        a thread makes one ahead, and the row sits out meanwhile; with one mask, it takes no drafts
"""

from __future__ import annotations

from collections.abc import Set

from shared.core.constraint import Constraint
from shared.core.request import Request
from shared.sched.steps.batch import ScheduleBatch

LEAST_S = 0.005  # about the shortest step of a served model
SHARE = 0.5  # below 1, because a step's time includes its wait for masks: one long wait must not allow the next
NOBODY: tuple[Set[Request], Set[Request]] = frozenset(), frozenset()


def rows_with_slow_masks(batch: ScheduleBatch, step_s: float) -> tuple[Set[Request], Set[Request]]:
    """Return the rows that sit the next step out, and those whose mask was made ahead.

    `step_s`: about the next step's time, 0 if unknown. The mask behind a token in flight is not known yet, so a slow
    row steps again only after its result.
    """
    late: set[Request] = set()
    prepared: set[Request] = set()
    left_s = max(LEAST_S, SHARE * step_s)
    for req in sorted(batch.constrained, key=lambda req: _masks_of(req).cost_s):
        constraint, index = _masks_of(req), batch.index_of(req)
        is_ready = constraint.is_ready
        # a grammar that has failed ends its request at the next mask
        if is_ready and (constraint.cost_s <= left_s or constraint.error is not None):
            left_s -= constraint.cost_s
            continue
        is_processed = index is not None and not batch.in_flight[index]
        if is_ready and is_processed:
            constraint.prepare(req.output_ids)
        (prepared if is_processed and constraint.is_prepared(req.output_ids) else late).add(req)
    return late, prepared


def _masks_of(req: Request) -> Constraint:
    assert req.constraint is not None
    return req.constraint
