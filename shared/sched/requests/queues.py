"""Keep a node's requests by state, and make the changes of state that other files share. No device work."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from shared.core.errors import BatonError, DeadlineExceeded
from shared.core.keys import RequestKey
from shared.core.request import Request, RequestState, TokenIds
from shared.core.states import FinishReason
from shared.engine.plan import RowId
from shared.kv.manager import KVManager
from shared.sched.memory.offload import ColdTier, NoOffload, Offload
from shared.sched.memory.page_budget import PageBudget
from shared.sched.memory.prefixes import PrefixesInFlight
from shared.sched.requests.answer_lengths import LengthEstimator
from shared.sched.requests.suspects import Suspects
from shared.sched.steps.batch import ScheduleBatch
from shared.sched.steps.chunking import ChunkedPrompt
from shared.sched.steps.events import Ended, GrantRevoked, LoanPreempted, PullPreempted, SchedCounters, SchedEvent
from shared.sched.steps.settings import SchedSettings

S = RequestState


class Queues:
    """Changes its lists in place, because other objects refer to them."""

    def __init__(self, kv: KVManager, settings: SchedSettings, tier: ColdTier | None) -> None:
        self._settings = settings
        self.budget = PageBudget(kv, settings)
        self.requests: dict[RequestKey, Request] = {}
        self.waiting: list[Request] = []  # in order of arrival
        # in order of arrival; a prompt leaves when all its chunks are planned
        self.prefilling: list[ChunkedPrompt] = []
        self.running = ScheduleBatch()
        self.granted: dict[RequestKey, Request] = {}
        self.handed_off: dict[RequestKey, Request] = {}
        self.ungranted: dict[RequestKey, Request] = {}  # hand-offs whose decode node has not answered
        self.oldest_offer: int | None = None  # decode node: the arrival of the oldest Offer that waits for memory
        self.prefixes = PrefixesInFlight(self.budget, settings)
        self.lengths = LengthEstimator()
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
        """Start a prompt whose row and pages are reserved. Its first `computed` tokens have KV."""
        if not req.incarnation:  # a retracted request's cached pages don't count in `usage`
            req.cached_tokens = min(computed, len(req.ask.prompt_ids))
        self.counters.cached_prompt_tokens += computed
        req.to(S.PREFILLING)
        req.computed = computed
        if req not in self.suspects:  # a step that fails must not hold up others
            self.prefixes.begin(req)
        self._await_chunks(ChunkedPrompt(req, ids, computed))

    def _await_chunks(self, chunk: ChunkedPrompt) -> None:
        bisect.insort(self.prefilling, chunk, key=lambda other: other.request.arrival)

    def rewind(self, req: Request) -> None:
        """Compute a prompt again from its last processed step. No step of the request may be in flight.

        Unlike a retraction, this keeps row and pages: a peer may be reading a hand-off's finished pages.
        """
        self.leave_prefilling([req])
        self.prefixes.leave(req)
        self._await_chunks(ChunkedPrompt(req, req.all_ids(), req.computed))

    def leave_prefilling(self, reqs: Iterable[Request]) -> None:
        left = set(reqs)
        self.prefilling[:] = [chunk for chunk in self.prefilling if chunk.request not in left]

    def join(self, reqs: list[Request], committed: list[int], step: int, in_flight: int) -> None:
        """Add RUNNING rows, whose KV must be complete."""
        batch = ScheduleBatch.of(reqs, committed, step, in_flight)
        self.running.merge_batch(batch)

    def drop_left_rows(self) -> None:
        keep = [i for i, req in enumerate(self.running.reqs) if req.state is S.RUNNING]
        self.running.filter_batch(np.asarray(keep, dtype=np.int64))

    def take_events(self) -> list[SchedEvent]:
        events, self.events = self.events, []
        return events

    def remember(self, req: Request) -> None:
        """Cache only the KV of processed steps, because a step in flight may fail."""
        self.budget.remember(req, req.all_ids()[: req.computed])
        self.prefixes.advance(req)

    def holders(self) -> Iterable[Request]:
        """Yield the requests that can be retracted. Hand-offs can't, because a peer may read their pages. Grants of
        prompts with scores can't, because the prefill node would end before it has sent them."""
        yield from (req for req in self.running.reqs if req.state is S.RUNNING)
        yield from (chunk.request for chunk in self.prefilling if chunk.request.handoff_to is None)
        yield from (req for req in self.restoring if req.handoff_to is None)
        yield from (req for req in self.granted.values() if req.ask.sampling.prompt_logprobs < 0)

    def pins_handoffs(self) -> bool:
        begun = [*(chunk.request for chunk in self.prefilling), *self.restoring]
        return bool(self.handed_off) or any(req.handoff_to is not None for req in begun)

    def retract(self, req: Request) -> None:
        """Free the request's row and pages. The request waits at its old place to be prefilled on this node.

        A token in flight is dropped, because it belongs to the old incarnation. Pages can be reused immediately,
        because later steps run after the steps in flight. Pages that the cold tier copies can be reused after the copy.
        """
        self.counters.retractions += 1
        if req.state is S.GRANTED:
            self._revoke_grant(req, retracted=True)
        elif req.state is S.RESTORING:
            self.offload.revoke(req)
        elif not self.offload.park(req):
            self.leave_prefilling([req])
            self.remember(req)
            self.budget.release(req)
        self.prefixes.leave(req)
        req.incarnation += 1
        req.computed, req.lacks_draft_state = 0, False
        req.to(S.WAITING)
        self.await_memory(req)

    def end_loan(self) -> bool:
        name = self.budget.newest_loan
        if name is None:
            return False
        self.budget.take_back(name)
        self.events.append(LoanPreempted(name))
        return True

    def give_up_pull(self) -> bool:
        """Give up the newest open pull, if any (rule f). The pull's memory is free after its copies."""
        row = self.budget.youngest_pulled
        if row is None:
            return False
        self.budget.hold_pulled(row)
        self.events.append(PullPreempted(row))
        return True

    def _revoke_grant(self, req: Request, retracted: bool) -> None:
        del self.granted[req.key]
        self.events.append(GrantRevoked(req, self.budget.hold(req), retracted))

    def living(self, row_ids: Sequence[RowId]) -> list[Request]:
        """Return the requests that have neither ended nor begun again since the launch."""
        found = [(self.requests.get(row_id.key), row_id.incarnation) for row_id in row_ids]
        return [req for req, incarnation in found if req is not None and req.incarnation == incarnation]

    def set_granted(self, key: RequestKey) -> None:
        """Note that a decode node has memory for this hand-off."""
        self.ungranted.pop(key, None)

    def complete_handoff(self, key: RequestKey) -> None:
        """End a hand-off whose KV the decode node has. The pages stay cached."""
        req = self.requests.pop(key, None)
        if req is not None:
            self.leave(req)

    def abort(self, key: RequestKey) -> None:
        """End a request in any state. Ignore an unknown key, because an abort may come late or twice."""
        req = self.requests.get(key)
        if req is not None:
            self.end(req, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        self.budget.ended.set_time(now)
        self.counters.kept_prefix_tokens = self.budget.ended.num_saved_tokens
        for req in [req for req in self.requests.values() if req.deadline < now]:
            self.fail(req.key, DeadlineExceeded("the request's deadline passed"))

    def fail(self, key: RequestKey, error: BatonError) -> None:
        req = self.requests.get(key)
        if req is not None:
            self.end(req, FinishReason.ERROR, error)

    def end(self, req: Request, reason: FinishReason, error: BatonError | None = None) -> None:
        if req.output_ids and req.handoff_to is None:
            self.lengths.learn(req, reason)
        self.requests.pop(req.key, None)
        self.leave(req)
        self.events.append(Ended(req.key, reason, len(req.output_ids), req.cached_tokens, error))

    def leave(self, req: Request) -> None:
        """Computed pages stay cached; the request's other pages are freed."""
        self.suspects.clear(req)
        self.prefixes.leave(req)
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
