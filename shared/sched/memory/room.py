"""Remember the request that found no room, until there may be more room.

A try is slow: it looks for the whole prompt in the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.sched.memory.page_budget import PageBudget, Shortage


@dataclass(frozen=True, slots=True)
class Room:
    spare: int  # available pages, without the pages that stay free
    num_free_rows: int
    num_left: int
    num_pins: int  # a lock of the remembered one's prefix takes from the room, and as much from its need

    def may_hold_more(self, than: Room) -> bool:
        has_row = self.num_free_rows > than.num_free_rows
        return has_row or self.num_left != than.num_left or self.num_pins != than.num_pins


class NoRoom:
    """Remembers one request. Requests of a kind are tried in order, so one is enough."""

    def __init__(self, budget: PageBudget) -> None:
        self._budget = budget
        self._noted: tuple[RequestKey, int, Shortage, Room] | None = None

    def note(self, req: Request, shortage: Shortage, keep_free: int) -> None:
        self._noted = req.key, req.incarnation, shortage, self._now(keep_free)

    def lacking(self, req: Request, keep_free: int) -> Shortage | None:
        """Return at least a part of what the remembered request lacks. None: another request, or maybe more room."""
        if self._noted is None or self._noted[:2] != (req.key, req.incarnation):
            return None
        _, _, shortage, before = self._noted
        now = self._now(keep_free)
        if now.may_hold_more(before) or (shortage.found and self._budget.kv.cache.has_news(shortage.found)):
            return None
        if not shortage.pages or not now.num_free_rows:
            return Shortage(0)
        lacking = shortage.pages + before.spare - now.spare
        return Shortage(lacking) if lacking > 0 else None

    def _now(self, keep_free: int) -> Room:
        kv = self._budget.kv
        return Room(kv.num_available - keep_free, kv.rows.num_free, self._budget.num_left, kv.cache.num_pins)
