"""Who may be prefilled now, and who gives way to whom: siblings behind their leader, hand-offs without a grant.

    ungranted   computed ahead, as long as they pin little; they hold memory for a decode node that has not answered
    others      granted (a decode node holds memory for them) or run here: these push ungranted ones out

Without that both nodes could wait for ever: the decode node's rows for prompts that find no memory here, and the
prompts that have it for a row there. Knows nothing of messages; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.kv.manager import KVManager, page_count
from shared.sched.settings import SchedSettings


def waits_for_sibling(req: Request, requests: Mapping[RequestKey, Request]) -> bool:
    """n > 1: the first sequence's prefix in the cache is better than memory of one's own."""
    if not req.key.seq_index:
        return False
    leader = requests.get(req.key.sibling(0))
    return leader is not None and leader.incarnation == 0 and leader.computed < len(leader.prompt_ids)


class UngrantedPins:
    """Ungranted hand-offs that hold memory, in one round of admission. `is_full`: one found no room in this round."""

    def __init__(self, kv: KVManager, settings: SchedSettings, ungranted: Iterable[Request]) -> None:
        self.is_full = False
        self._kv = kv
        self._settings = settings
        self._holders = [req for req in ungranted if req.row]
        self._num_pages = sum(self._pages_of(req) for req in self._holders)

    def _pages_of(self, req: Request) -> int:
        return int(self._kv.rows.num_pages[req.row])

    def have_room(self, req: Request) -> bool:
        """For one more. A single one may be larger than the cap: it goes alone."""
        pages = self._num_pages + page_count(req.num_tokens, self._settings.page_size)
        return not self._holders or pages <= self._settings.max_ungranted_pages

    def add(self, req: Request) -> None:
        self._holders.append(req)
        self._num_pages += self._pages_of(req)

    def pop_youngest(self) -> Request | None:
        """The one to give its memory back, which the caller does at once."""
        if not self._holders:
            return None
        youngest = max(self._holders, key=lambda req: req.arrival)
        self._holders.remove(youngest)
        self._num_pages -= self._pages_of(youngest)
        return youngest
