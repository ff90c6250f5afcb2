"""Estimate how long answers go on, from the lengths of a node's latest answers: per tenant, or of all tenants together.

An answer that still runs says as much as one that ended: it is longer than its length so far. Without this, a burst
would look short at first, because its short answers end first (the estimate is that of Kaplan and Meier).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.core.request import Request
from shared.core.states import FinishReason
from shared.engine.plan import Int64s

Floats = npt.NDArray[np.float64]

CELL = 16  # tokens; lengths are counted in cells
LATEST = 64  # answers that count; earlier ones are forgotten, because loads change
ENOUGH = 16  # answers of a tenant, from which on only the tenant's own answers count
MAX_TENANTS = 256  # the tenant with the oldest answer is forgotten first
# Until answers have ended, the estimate is that of two answers with a mean of 512 tokens.
ASSUMED, ASSUMED_CELLS = 2.0, 32
ALL = 0  # no tenant has this number


@dataclass(frozen=True, slots=True)
class Survival:
    """`log_alive[b]`: logarithm of the share of answers that reach cell b. Beyond, it changes by `tail` per cell."""

    log_alive: Floats
    tail: float

    def alive(self, lengths: Int64s, ahead: Int64s) -> Floats:
        """Return (num lengths, num ahead): the share of answers of a length that go on for `ahead` cells."""
        return np.asarray(np.exp(self._log(lengths[:, None] + ahead) - self._log(lengths)[:, None]))

    def _log(self, cells: Int64s) -> Floats:
        known = np.minimum(cells, len(self.log_alive) - 1)
        return self.log_alive[known] + (cells - known) * self.tail


class LengthEstimator:
    def __init__(self) -> None:
        # tenant -> cells of each answer, and whether it came to its own end; the latest answer's tenant is last
        self._ended: OrderedDict[int, deque[tuple[int, bool]]] = OrderedDict()

    def learn(self, req: Request, reason: FinishReason) -> None:
        """Note an answer. A client that had enough ended it; a limit or an error only cut it."""
        for tenant in {ALL, req.ask.tenant}:
            latest = self._ended.setdefault(tenant, deque(maxlen=LATEST))
            latest.append((len(req.output_ids) // CELL, reason in (FinishReason.STOP, FinishReason.ABORT)))
            self._ended.move_to_end(tenant)
        if len(self._ended) > MAX_TENANTS:
            self._ended.popitem(last=False)

    def doubt(self) -> None:
        """Forget a quarter of the answers: a request was retracted, so answers may be longer than they were."""
        for latest in self._ended.values():
            for _ in range(len(latest) // 4):
                latest.popleft()

    def group_of(self, tenant: int) -> int:
        return tenant if len(self._ended.get(tenant, ())) >= ENOUGH else ALL

    def survival(self, group: int, running: Int64s) -> Survival:
        """`running`: cells of the group's answers that go on."""
        latest = self._ended.get(group, ())
        ended = np.asarray([cells for cells, is_whole in latest if is_whole], np.int64)
        cut = np.asarray([cells for cells, is_whole in latest if not is_whole], np.int64)
        lived = np.concatenate([ended, cut, running])
        longest = int(lived.max(initial=ASSUMED_CELLS))
        reached = np.bincount(lived, minlength=longest + 1)[::-1].cumsum()[::-1]
        rate = 1 / longest  # an answer beyond all others is expected to go on for the longest one's length
        ends = (np.bincount(ended, minlength=longest + 1) + ASSUMED * rate) / (reached + ASSUMED)
        return Survival(np.concatenate([[0.0], np.log1p(-ends).cumsum()]), float(np.log1p(-rate)))
