"""Remember the grant that found no room, until there may be more room.

A try is slow: it matches the whole prompt with the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.keys import RequestKey
from shared.sched.page_budget import PageBudget


@dataclass(frozen=True, slots=True)
class Room:
    num_available: int
    num_cached: int
    num_free_rows: int
    headroom: int
    num_left: int

    def may_hold_more(self, than: Room) -> bool:
        grew = self.num_available > than.num_available or self.num_cached > than.num_cached
        grew = grew or self.num_free_rows > than.num_free_rows or self.headroom < than.headroom
        return grew or self.num_left != than.num_left


class NoRoom:
    """Remembers one grant. Grants are tried in order, so one is enough."""

    def __init__(self, budget: PageBudget) -> None:
        self._budget = budget
        self._key: RequestKey | None = None
        self._room: Room | None = None

    def note(self, key: RequestKey, headroom: int) -> None:
        self._key, self._room = key, self._now(headroom)

    def is_still_so(self, key: RequestKey, headroom: int) -> bool:
        return key == self._key and self._room is not None and not self._now(headroom).may_hold_more(self._room)

    def _now(self, headroom: int) -> Room:
        kv = self._budget.kv
        return Room(kv.num_available, kv.cache.num_cached, kv.rows.num_free, headroom, self._budget.num_left)
