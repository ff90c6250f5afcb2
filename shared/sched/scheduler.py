"""The scheduler: which rows run in the next step. Sans-IO and single-threaded: no clock, no socket, no thread.

        submit -> WAITING -> PREFILLING -> RUNNING -> FINISHED          here from start to end
                                       \\-> HANDED_OFF -> FINISHED       prefill node, KV goes to a decode node
        grant  -> GRANTED -> RUNNING -> FINISHED                        decode node, KV comes from a prefill node

`plan` is pure towards the device apart from length arithmetic on the schedule stream; everything that may wait or
raise (exact lengths) is done by the loop before it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from shared.core.errors import BatonError, IntegrityError
from shared.core.keys import RequestKey
from shared.core.request import FinishReason, Request, RequestState
from shared.device.stream import Stream
from shared.engine.plan import Admission, Int64s, RowId, StepPlan, StepResult
from shared.kv.manager import KVManager, page_count
from shared.sched.admission import Pins, waits_for_sibling
from shared.sched.batch import ScheduleBatch
from shared.sched.chunking import ChunkedPrompt, share_budget
from shared.sched.draft_length import WidthChoice
from shared.sched.events import ChunkReady, Ended, GrantRevoked, HandoffUnpinned, PrefillDone, SchedCounters, SchedEvent
from shared.sched.freeze import ChunkShare, PlanFreezer
from shared.sched.memory import PageBudget, pick_victim
from shared.sched.mirror import concat_lengths
from shared.sched.output import append_tokens, logprobs_of
from shared.sched.prebuilt import Arrival, build_admission
from shared.sched.settings import SchedSettings

S = RequestState


class Scheduler:
    """Owner of all requests of a node. Queues are named for the state of the requests in them."""

    def __init__(
        self, kv: KVManager, settings: SchedSettings, schedule: Stream, new_step: Callable[[], int], widths: WidthChoice
    ) -> None:
        self.settings = settings
        self.widths = widths
        self.budget = PageBudget(kv, settings)
        self.kv = kv
        self._schedule = schedule
        self._new_step = new_step
        self._freezer = PlanFreezer(kv, settings)
        self.requests: dict[RequestKey, Request] = {}
        self.waiting: list[Request] = []  # by arrival
        self.prefilling: list[ChunkedPrompt] = []  # by arrival; all chunks planned: no longer here
        self.running = ScheduleBatch(schedule, settings.device)
        self.granted: dict[RequestKey, Request] = {}
        self.handed_off: dict[RequestKey, Request] = {}
        self.ungranted: set[RequestKey] = set()  # hand-offs whose decode node has not answered yet
        self.oldest_offer: int | None = None  # decode node: arrival of the Offer that waits for memory longest
        self.counters = SchedCounters()
        self._events: list[SchedEvent] = []
        self._last_was_prefill = False

    # ---- intake

    def submit(self, req: Request) -> None:
        """Queue a request. One that can never fit ends at once with an error."""
        self.requests[req.key] = req
        if not self.can_fit(req):
            self._end(
                req, FinishReason.ERROR, "too_large", f"{req.num_tokens} tokens and an answer can never fit this node"
            )
            return
        if req.handoff_to is not None:
            self.ungranted.add(req.key)
        bisect.insort(self.waiting, req, key=lambda other: other.arrival)

    def can_fit(self, req: Request) -> bool:
        """Whether an empty node could run it to its end."""
        return self.budget.can_ever_hold(req)

    def abort(self, key: RequestKey) -> None:
        """Any state; unknown keys are legal (late or duplicate). Pages are free at once, or held by a pull."""
        req = self.requests.get(key)
        if req is not None:
            self._end(req, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """End requests past their deadline."""
        for req in [req for req in self.requests.values() if req.deadline < now]:
            self._end(req, FinishReason.ERROR, "deadline_exceeded", "the request's deadline passed")

    def fail(self, key: RequestKey, error: BatonError) -> None:
        req = self.requests.get(key)
        if req is not None:
            self._end(req, FinishReason.ERROR, error.code, error.message)

    def take_events(self) -> list[SchedEvent]:
        events, self._events = self._events, []
        return events

    # ---- hand-off, decode side

    def grant(self, req: Request) -> int | None:
        """Reserve row and pages for a request whose KV will come, all or nothing (rule a applies). Returns the
        cached prefix in tokens, page aligned, or None: not now."""
        cached = self.budget.reserve(req, req.all_ids(), self.settings.width, self._headroom(), "granted")
        if cached is None:
            return None
        req.cached_tokens = cached
        req.to(S.GRANTED)
        self.requests[req.key] = req
        self.granted[req.key] = req
        return cached

    def process_prebuilt(self, arrivals: Sequence[Arrival]) -> Admission | None:
        """Rows whose KV and record are here join the running batch: metadata only, no forward. Their first token is
        repeated to the router; one that ends with it never enters the batch."""
        joining = [arrival for arrival in arrivals if self._accept_first_token(arrival)]
        if not joining:
            return None
        admission = build_admission(self._new_step(), joining, self.settings)
        self._join([arrival.request for arrival in joining], admission.committed.tolist(), admission.step, 0)
        return admission

    def _join(self, reqs: list[Request], committed: list[int], step: int, in_flight: int) -> None:
        """Rows in state RUNNING, whose KV is complete, enter the batch."""
        batch = ScheduleBatch.of(reqs, committed, step, in_flight, self._schedule, self.settings.device)
        self.running.merge_batch(batch)

    def _accept_first_token(self, arrival: Arrival) -> bool:
        req = arrival.request
        del self.granted[req.key]
        self.kv.set_tag(req.row, "active")
        req.to(S.RUNNING)
        req.computed = arrival.committed
        self._remember(req)
        emitted, reason = append_tokens(req, [arrival.token], arrival.logprobs)
        self._events.append(emitted)
        if reason is not None:
            self._end(req, reason)
        return reason is None

    def release_held(self, row: int) -> None:
        """The pull into a revoked grant's pages is over."""
        self.budget.release_held(row)

    # ---- hand-off, prefill side

    def set_granted(self, key: RequestKey) -> None:
        """The decode node answered: the request no longer counts against the cap of ungranted pages."""
        self.ungranted.discard(key)

    def complete_handoff(self, key: RequestKey) -> None:
        """The decode node has everything: our pages go to the prefix cache."""
        req = self.requests.pop(key, None)
        if req is not None:
            self._leave(req)

    # ---- planning

    def plan(self) -> StepPlan | None:
        self._drop_left_rows()
        self.running.prepare_for_decode(self.settings.speculative)
        width = self.widths.choose(len(self.running))
        stepping = self._reserve_running(width)
        self._drop_left_rows()
        self._admit_waiting()
        rows = np.asarray([i for i, req in enumerate(self.running.reqs) if req in stepping], dtype=np.int64)
        if not self.settings.mix and self.prefilling and not self._last_was_prefill:
            rows = rows[:0]  # steps alternate
        shares = [] if len(rows) and not self.settings.mix else self._share_chunks(mixed=len(rows) > 0)
        if not shares and not len(rows):
            return None
        self._last_was_prefill = bool(shares)
        return self._launchable(shares, rows, width)

    def _launchable(self, shares: list[ChunkShare], rows: Int64s, width: int) -> StepPlan:
        step = self._new_step()
        lengths = self.running.seq_lens.take(rows)
        if shares:
            computed = np.asarray([share.chunk.computed for share in shares], dtype=np.int64)
            chunks = torch.from_numpy(computed).to(self.settings.device, non_blocking=True)
            lengths = concat_lengths(self._schedule, chunks, lengths) if len(rows) else chunks
        plan = self._freezer.freeze(step, shares, self.running, rows, lengths, width)
        self.running.mark_planned(rows, step, width, self.settings.speculative)
        self._advance_chunks(shares, step)
        return plan

    def _drop_left_rows(self) -> None:
        keep = [i for i, req in enumerate(self.running.reqs) if req.state is S.RUNNING]
        self.running.filter_batch(np.asarray(keep, dtype=np.int64))

    def _reserve_running(self, width: int) -> set[Request]:
        """Rows that step: not surely at their end, and with pages for what they may commit (rule a)."""
        stepping: set[Request] = set()
        batch = self.running
        order = sorted(range(len(batch)), key=lambda i: batch.reqs[i].arrival)
        for i in order:
            req = batch.reqs[i]
            outputs = int(batch.seq_lens.lo[i]) + 1 - len(req.prompt_ids)
            if outputs >= req.sampling.max_tokens or req.state is not S.RUNNING:
                continue
            if self._make_room(req, int(batch.seq_lens.hi[i]) + width):
                stepping.add(req)
        return {req for req in stepping if req.state is S.RUNNING}

    def _make_room(self, req: Request, num_tokens: int) -> bool:
        while not self.budget.cover(req.row, num_tokens):
            missing = page_count(num_tokens, self.settings.page_size) - int(self.kv.rows.num_pages[req.row])
            if self.kv.num_available + self.budget.num_held >= missing:
                return False  # rule d: skip this step
            victim = pick_victim(self._holders())
            if victim is None and self._pins_handoffs():
                return False
            # Alone and still short: its lock pins pages that the cache had under the same keys as its own (two equal
            # prompts were computed side by side). Beginning again it takes those, and then it fits: `submit` saw to it.
            victim = victim or req
            self.retract(victim)
            if victim is req:
                return False
        return True

    def _holders(self) -> Iterable[Request]:
        """Who can be retracted. Prompts to hand over are not among them: they have all they need, and their pages
        are promised to a peer."""
        yield from (req for req in self.running.reqs if req.state is S.RUNNING)
        yield from (chunk.request for chunk in self.prefilling if chunk.request.handoff_to is None)
        yield from self.granted.values()

    def _pins_handoffs(self) -> bool:
        return bool(self.handed_off) or any(chunk.request.handoff_to is not None for chunk in self.prefilling)

    def retract(self, req: Request) -> None:
        """Give the row and pages back; the request waits, by its old arrival, to be prefilled again here. A token in
        flight is dropped with its incarnation. On-stream order makes the pages reusable at once."""
        self.counters.retractions += 1
        if req.state is S.GRANTED:
            self._revoke_grant(req, retracted=True)
        else:
            self.prefilling = [chunk for chunk in self.prefilling if chunk.request is not req]
            self._remember(req)
            self.budget.release(req)
        req.incarnation += 1
        req.computed, req.lacks_draft_state = 0, False
        req.to(S.WAITING)
        bisect.insort(self.waiting, req, key=lambda other: other.arrival)

    def _revoke_grant(self, req: Request, retracted: bool) -> None:
        del self.granted[req.key]
        self._events.append(GrantRevoked(req, self.budget.hold(req), retracted))

    def _headroom(self) -> int:
        return self.budget.headroom(len(self.running) + len(self.granted) + len(self.prefilling))

    def _admit_waiting(self) -> None:
        """By arrival; the first that does not fit ends the round, so nobody is overtaken for memory, but for those
        whose decode node has not answered: who has a grant goes before them."""
        pins = Pins(self.kv, self.settings, (self.requests[key] for key in self.ungranted))
        for req in list(self.waiting):
            if self.oldest_offer is not None and req.arrival > self.oldest_offer:
                return  # an Offer is older: it gets memory first
            if self.kv.cache.enabled and waits_for_sibling(req, self.requests):
                continue
            if req.key in self.ungranted:
                if pins.have_room(req) and self._admit(req):
                    pins.add(req)
                continue
            while not self._admit(req):
                victim = pins.pop_youngest()
                if victim is None:
                    return
                self._unpin(victim)

    def _admit(self, req: Request) -> bool:
        ids, extra = req.all_ids(), 0 if req.handoff_to is not None else self.settings.width
        cached = self.budget.reserve(req, ids, extra, self._headroom(), "active")
        if cached is None:
            return False
        self.waiting.remove(req)
        if not req.incarnation:  # what a retracted one finds of its own is no saving of the client's
            req.cached_tokens = min(cached, len(req.prompt_ids))
        self.counters.cached_prompt_tokens += cached
        req.to(S.PREFILLING)
        bisect.insort(self.prefilling, ChunkedPrompt(req, ids, cached), key=lambda chunk: chunk.request.arrival)
        return True

    def _unpin(self, req: Request) -> None:
        """An ungranted hand-off gives way and is prefilled again later; its first token will be the same."""
        if self.handed_off.pop(req.key, None) is not None:
            req.output_ids.pop()
        self._events.append(HandoffUnpinned(req))
        self.retract(req)

    def _share_chunks(self, mixed: bool) -> list[ChunkShare]:
        budget = self.settings.mixed_chunk_size if mixed else self.settings.chunk_size
        shares = share_budget([chunk.remaining for chunk in self.prefilling], budget)
        return [ChunkShare(chunk, q) for chunk, q in zip(self.prefilling, shares, strict=True) if q]

    def _advance_chunks(self, shares: Sequence[ChunkShare], step: int) -> None:
        done = [share.chunk for share in shares if share.is_last]
        for share in shares:
            self.counters.prompt_tokens += share.q_len
            share.chunk.computed += share.q_len
            share.chunk.started = True
        self.prefilling = [chunk for chunk in self.prefilling if chunk not in done]
        local = [chunk for chunk in done if chunk.request.handoff_to is None]
        for chunk in local:
            chunk.request.to(S.RUNNING)
        self._join([chunk.request for chunk in local], [len(chunk.ids) for chunk in local], step, 1)

    # ---- results

    def process(self, result: StepResult) -> None:
        """Take a step's tokens. Rows that ended, or began a new incarnation, meanwhile are zombies: dropped."""
        self.widths.observe(result)
        self.counters.count_times(result)
        for index, row_id in enumerate(result.row_ids):
            req = self.requests.get(row_id.key)
            if req is None or req.incarnation != row_id.incarnation or req.state in (S.WAITING, S.FINISHED):
                continue
            if not result.tag_ok[index]:
                self.fail(req.key, IntegrityError(f"step {result.step} read a relay row that another step had written"))
            elif result.accept_lens[index] == 0:
                self._chunk_processed(req, int(result.seq_lens[index]))
            else:
                self._tokens_processed(req, result, index)

    def _remember(self, req: Request) -> None:
        """Only what a processed step computed: one that is in flight may fail yet."""
        self.budget.remember(req, req.all_ids()[: req.computed])

    def _chunk_processed(self, req: Request, committed: int) -> None:
        req.computed = committed
        if req.handoff_to is not None:
            self._events.append(ChunkReady(req, committed))

    def _tokens_processed(self, req: Request, result: StepResult, index: int) -> None:
        req.computed = committed = int(result.seq_lens[index])
        self.running.on_processed(req, committed, result.stepped(index), self.settings.speculative)
        if index < result.num_prefill:
            self._remember(req)
        run = result.tokens[index, : result.accept_lens[index]].tolist()
        emitted, reason = append_tokens(req, run, logprobs_of(req, result, index))
        self._events.append(emitted)
        self.counters.count_run(result, index, len(emitted.ids))
        if reason is not None:
            self._end(req, reason)
        elif req.state is S.PREFILLING:
            req.to(S.HANDED_OFF)
            self.handed_off[req.key] = req
            draft_state = {name: value[index] for name, value in result.draft_state.items()}
            self._events.append(PrefillDone(req, emitted.ids[0], committed, emitted.logprobs, draft_state))

    def resolve(self, lengths: torch.Tensor) -> None:
        """Exact lengths of the running rows, device and host mirrors together (S6)."""
        self.running.seq_lens.set_exact(lengths)

    def step_failed(self, failed: Sequence[RowId], drained: Sequence[RowId], error: BatonError) -> None:
        """A closure raised. The requests of that step fail; the others that had a step in flight (`drained`) start
        again, but for hand-offs, whose pages are promised to a peer: they fail too."""
        for req in self._living(failed):
            self.fail(req.key, error)
        for req in self._living(drained):
            if req.handoff_to is not None:
                self.fail(req.key, error)
            elif req.state in (S.RUNNING, S.PREFILLING):
                self.retract(req)
        for req in self.running.reqs:
            if req.state is S.RUNNING:
                self.retract(req)
        self._drop_left_rows()

    def _living(self, row_ids: Sequence[RowId]) -> list[Request]:
        """Whose life it still is: one that was retracted since has nothing to do with the step."""
        found = [(self.requests.get(row_id.key), row_id.incarnation) for row_id in row_ids]
        return [req for req, incarnation in found if req is not None and req.incarnation == incarnation]

    # ---- ends

    def _end(self, req: Request, reason: FinishReason, code: str = "", message: str = "") -> None:
        req.finish_reason = reason
        self.requests.pop(req.key, None)
        self._leave(req)
        self._events.append(Ended(req.key, reason, len(req.output_ids), req.cached_tokens, code, message))

    def _leave(self, req: Request) -> None:
        """Out of every queue; computed pages stay in the prefix cache, the others are free."""
        self.waiting = [other for other in self.waiting if other is not req]
        self.prefilling = [chunk for chunk in self.prefilling if chunk.request is not req]
        self.handed_off.pop(req.key, None)
        self.ungranted.discard(req.key)
        if req.state is S.GRANTED:
            self._revoke_grant(req, retracted=False)
        elif req.row:
            self._remember(req)
            self.budget.release(req)
        req.to(S.FINISHED)
