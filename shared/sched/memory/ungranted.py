"""Ungranted hand-offs give way to all other requests:

    ungranted   are computed ahead, but pin only little memory; they hold this memory until a decode node answers
    others      are granted (a decode node holds memory for them) or local; they take memory from ungranted hand-offs

Without this rule, two nodes could wait forever for each other's memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.core.request import Request
from shared.kv.manager import KVManager
from shared.sched.steps.settings import SchedSettings


class UngrantedPins:
    """The ungranted hand-offs with memory in one admission round. `is_full`: whether a hand-off found no room."""

    def __init__(self, kv: KVManager, settings: SchedSettings, ungranted: Iterable[Request]) -> None:
        self.is_full = False
        self._kv = kv
        self._settings = settings
        self._holders = [req for req in ungranted if req.row]
        self.num_pages = sum(self._pages_of(req) for req in self._holders)  # a shared page counts once per hand-off

    def _pages_of(self, req: Request) -> int:
        return self._kv.num_held(req.row)

    def have_room(self, req: Request) -> bool:
        """Return whether the request fits under the limit. The first hand-off with memory always fits."""
        pages = self.num_pages + self._settings.num_pages(req.num_tokens)
        return not self._holders or pages <= self._settings.max_ungranted_pages

    def add(self, req: Request) -> None:
        self._holders.append(req)
        self.num_pages += self._pages_of(req)

    def pop_youngest(self) -> Request | None:
        """Take the youngest hand-off. The caller must immediately free the hand-off's memory."""
        if not self._holders:
            return None
        youngest = max(self._holders, key=lambda req: req.arrival)
        self._holders.remove(youngest)
        self.num_pages -= self._pages_of(youngest)
        return youngest
