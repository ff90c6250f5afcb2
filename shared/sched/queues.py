"""All requests of a node by state, and the moves that several parts of the scheduler make: retract, end, leave.

Owns no rule about who may run or who gives way; whoever decides that calls these. No device work.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from shared.core.errors import BatonError
from shared.core.keys import RequestKey
from shared.core.request import Request, RequestState, TokenIds
from shared.core.states import FinishReason
from shared.engine.plan import RowId
from shared.kv.manager import KVManager
from shared.sched.batch import ScheduleBatch
from shared.sched.chunking import ChunkedPrompt
from shared.sched.events import Ended, GrantRevoked, SchedCounters, SchedEvent
from shared.sched.offload import ColdTier, NoOffload, Offload
from shared.sched.page_budget import PageBudget
from shared.sched.settings import SchedSettings
from shared.sched.suspects import Suspects

S = RequestState


class Queues:
    """Each is named for the state of the requests in it. Lists are changed in place: others hold them."""

    def __init__(self, kv: KVManager, settings: SchedSettings, tier: ColdTier | None) -> None:
        self._settings = settings
        self.budget = PageBudget(kv, settings)
        self.requests: dict[RequestKey, Request] = {}
        self.waiting: list[Request] = []  # by arrival
        self.prefilling: list[ChunkedPrompt] = []  # by arrival; all chunks planned: no longer here
        self.running = ScheduleBatch()
        self.granted: dict[RequestKey, Request] = {}
        self.handed_off: dict[RequestKey, Request] = {}
        self.ungranted: dict[RequestKey, Request] = {}  # hand-offs whose decode node has not answered yet
        self.suspects = Suspects()
        self.counters = SchedCounters()
        self.events: list[SchedEvent] = []
        self.offload: Offload | NoOffload = NoOffload()
        if tier is not None:
            self.offload = Offload(tier, kv, settings, self.budget, self.counters)

    def await_memory(self, req: Request) -> None:
        bisect.insort(self.waiting, req, key=lambda other: other.arrival)

    @property
    def restoring(self) -> list[Request]:
        return [restore.request for restore in self.offload.restoring.values()]

    def begin_prefill(self, req: Request, ids: TokenIds, computed: int) -> None:
        """Row and pages are reserved, and the KV of the first `computed` tokens is there."""
        if not req.incarnation:  # what a retracted one finds of its own is no saving of the client's
            req.cached_tokens = min(computed, len(req.prompt_ids))
        self.counters.cached_prompt_tokens += computed
        req.to(S.PREFILLING)
        req.computed = computed
        self._await_chunks(ChunkedPrompt(req, ids, computed))

    def _await_chunks(self, chunk: ChunkedPrompt) -> None:
        bisect.insort(self.prefilling, chunk, key=lambda other: other.request.arrival)

    def rewind(self, req: Request) -> None:
        """Compute again what no processed step has computed of a prompt; row and pages stay. For prompts to hand over,
        whose finished pages a peer may be reading. No step of it may be in flight."""
        self.leave_prefilling([req])
        self._await_chunks(ChunkedPrompt(req, req.all_ids(), req.computed))

    def leave_prefilling(self, reqs: Iterable[Request]) -> None:
        left = set(reqs)
        self.prefilling[:] = [chunk for chunk in self.prefilling if chunk.request not in left]

    def join(self, reqs: list[Request], committed: list[int], step: int, in_flight: int) -> None:
        """Rows in state RUNNING, whose KV is complete, enter the batch."""
        batch = ScheduleBatch.of(reqs, committed, step, in_flight)
        self.running.merge_batch(batch)

    def remember(self, req: Request) -> None:
        """Only what a processed step computed: one that is in flight may fail yet."""
        self.budget.remember(req, req.all_ids()[: req.computed])

    def holders(self) -> Iterable[Request]:
        """Who can be retracted. Prompts to hand over are not among them: they have all they need, and their pages
        are promised to a peer."""
        yield from (req for req in self.running.reqs if req.state is S.RUNNING)
        yield from (chunk.request for chunk in self.prefilling if chunk.request.handoff_to is None)
        yield from (req for req in self.restoring if req.handoff_to is None)
        yield from self.granted.values()

    def pins_handoffs(self) -> bool:
        begun = [*(chunk.request for chunk in self.prefilling), *self.restoring]
        return bool(self.handed_off) or any(req.handoff_to is not None for req in begun)

    def retract(self, req: Request) -> None:
        """Give the row and pages back; the request waits, by its old arrival, to be prefilled again here. A token in
        flight is dropped with its incarnation. On-stream order makes the pages reusable at once; with a cold tier they
        are held until they lie there too."""
        self.counters.retractions += 1
        if req.state is S.GRANTED:
            self._revoke_grant(req, retracted=True)
        elif req.state is S.RESTORING:
            self.offload.revoke(req)
        elif not self.offload.park(req):
            self.leave_prefilling([req])
            self.remember(req)
            self.budget.release(req)
        req.incarnation += 1
        req.computed, req.lacks_draft_state = 0, False
        req.to(S.WAITING)
        self.await_memory(req)

    def _revoke_grant(self, req: Request, retracted: bool) -> None:
        del self.granted[req.key]
        self.events.append(GrantRevoked(req, self.budget.hold(req), retracted))

    def living(self, row_ids: Sequence[RowId]) -> list[Request]:
        """Whose life it still is: one that was retracted since has nothing to do with the step."""
        found = [(self.requests.get(row_id.key), row_id.incarnation) for row_id in row_ids]
        return [req for req, incarnation in found if req is not None and req.incarnation == incarnation]

    def fail(self, key: RequestKey, error: BatonError) -> None:
        req = self.requests.get(key)
        if req is not None:
            self.end(req, FinishReason.ERROR, error)

    def end(self, req: Request, reason: FinishReason, error: BatonError | None = None) -> None:
        """`error`: with reason ERROR, and only then; `fail` is the way to it."""
        req.finish_reason = reason
        self.requests.pop(req.key, None)
        self.leave(req)
        self.events.append(Ended(req.key, reason, len(req.output_ids), req.cached_tokens, error))

    def leave(self, req: Request) -> None:
        """Out of every queue; computed pages stay in the prefix cache, the others are free."""
        self.suspects.clear(req)
        if req.constraint is not None:
            req.constraint.cancel()
        self.waiting[:] = [other for other in self.waiting if other is not req]
        self.leave_prefilling([req])
        self.handed_off.pop(req.key, None)
        self.ungranted.pop(req.key, None)
        if req.state is S.GRANTED:
            self._revoke_grant(req, retracted=False)
        elif req.state is S.RESTORING:
            self.offload.revoke(req)
        elif req.row:
            self.remember(req)
            self.budget.release(req)
        req.to(S.FINISHED)
