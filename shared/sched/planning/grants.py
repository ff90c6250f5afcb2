"""Reserve memory for a grant, and add its row to the batch when a prefill node has sent the KV.

grant -> GRANTED -> RUNNING -> FINISHED          revoked: the row is held until its pull has ended
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.core.request import Request, RequestState
from shared.core.states import PageState
from shared.engine.plan import Admission
from shared.kv.manager import KVManager
from shared.sched.memory.page_budget import Shortage
from shared.sched.memory.room import NoRoom
from shared.sched.planning.capacity import Capacity
from shared.sched.requests.output import append_tokens
from shared.sched.requests.queues import Queues
from shared.sched.steps.prebuilt import Arrival, build_admission
from shared.sched.steps.settings import SchedSettings

S = RequestState


class Grants:
    def __init__(
        self, kv: KVManager, settings: SchedSettings, queues: Queues, capacity: Capacity, new_step: Callable[[], int]
    ) -> None:
        self._kv = kv
        self._settings = settings
        self._queues = queues
        self._capacity = capacity
        self._new_step = new_step
        self._no_room = NoRoom(queues.budget)

    def grant(self, req: Request, source: str) -> int | None:
        """Reserve a row and the pages that its steps will read for a grant from `source`, or nothing (rule a).

        Return the number of cached prefix tokens, a multiple of the page size. Return None if there is no room now.
        Tokens outside the windows of all page groups count as cached.
        """
        keep_free = self._capacity.keep_free(req)
        if self._no_room.lacking(req, keep_free) is not None:
            return None
        ids = req.all_ids()
        firsts = self._kv.cache.first_needed(len(ids))
        cached = self._queues.budget.reserve(req, ids, self._settings.width, keep_free, PageState.GRANTED, firsts)
        if isinstance(cached, Shortage):
            self._no_room.note(req, cached, keep_free)
            return None
        req.cached_tokens = req.computed = cached
        req.to(S.GRANTED)
        self._queues.requests[req.key] = req
        self._queues.granted[req.key] = req
        self._queues.prefixes.begin(req, source)
        self._capacity.growth.begin(req)
        return cached

    def granted_arrived(self, req: Request, num_tokens: int) -> None:
        """Cache the first pages of a grant, unless it was revoked. Their KV must be in the pool."""
        if req.state is S.GRANTED:
            req.computed = num_tokens
            self._queues.remember(req)

    def process_prebuilt(self, arrivals: Sequence[Arrival]) -> Admission | None:
        """Add arrived rows to the running batch, without a forward.

        Each row's first token goes to the router again, and may end the row.
        """
        joining = [arrival for arrival in arrivals if self._accept_first_token(arrival)]
        if not joining:
            return None
        admission = build_admission(self._new_step(), joining, self._settings)
        self._queues.join([arrival.request for arrival in joining], admission.committed.tolist(), admission.step, 0)
        return admission

    def _accept_first_token(self, arrival: Arrival) -> bool:
        req = arrival.request
        del self._queues.granted[req.key]
        self._kv.set_tag(req.row, PageState.ACTIVE)
        req.to(S.RUNNING)
        req.computed = arrival.committed
        self._queues.remember(req)
        emitted, reason = append_tokens(req, [arrival.token], arrival.logprobs)
        self._queues.events.append(emitted)
        if reason is not None:
            self._queues.end(req, reason)
        return reason is None
