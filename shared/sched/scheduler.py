"""Decide which rows run in the next step. The scheduler is single-threaded, and has no clock and no socket.

        submit -> WAITING -> PREFILLING -> RUNNING -> FINISHED          here from start to end
                                       \\-> HANDED_OFF -> FINISHED       prefill node, KV goes to a decode node
                   WAITING -> RESTORING -> PREFILLING or RUNNING        KV comes back from the cold tier
        grant  -> GRANTED -> RUNNING -> FINISHED                        decode node, KV comes from a prefill node

`plan` touches no device. Before `plan`, the loop does everything that may wait or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shared.core.errors import BatonError, DeadlineExceeded, InvalidRequest, TooLarge
from shared.core.keys import RequestKey
from shared.core.request import Request, RequestState
from shared.core.states import FinishReason, PageState
from shared.engine.masks import HostDrafts
from shared.engine.plan import Admission, Int64s, RowId, StepPlan, StepResult
from shared.engine.stages import every_row
from shared.grammar.grammars import Grammars
from shared.kv.manager import KVManager
from shared.model.interface import LayerMarks
from shared.sample.interface import TokenMasks
from shared.sched.batch import ScheduleBatch
from shared.sched.capacity import Capacity
from shared.sched.chunking import ChunkedPrompt
from shared.sched.draft_length import WidthChoice
from shared.sched.events import ChunkLaunched, SchedEvent
from shared.sched.freeze import ChunkShare, PlanFreezer
from shared.sched.masks import MaskMaker
from shared.sched.mixed_chunk import FixedChunk, MixedChunk
from shared.sched.offload import ColdTier, Restore
from shared.sched.output import append_tokens
from shared.sched.page_budget import Shortage
from shared.sched.prebuilt import Arrival, build_admission
from shared.sched.probe import probe_plan
from shared.sched.queues import Queues
from shared.sched.results import Results
from shared.sched.room import NoRoom
from shared.sched.settings import SchedSettings
from shared.wire.fitting import NO_GRAMMAR

S = RequestState
NO_GRAMMARS = "this node follows no grammars: it has --pp, or a model with an encoder or an unknown vocabulary"


class Scheduler:
    """The attributes from `requests` to `counters` are the same objects as in `queues`."""

    def __init__(
        self,
        kv: KVManager,
        settings: SchedSettings,
        new_step: Callable[[], int],
        widths: WidthChoice,
        tier: ColdTier | None = None,
        choose_rows: Callable[[Int64s, Int64s], Int64s] = every_row,
        grammars: Grammars | None = None,
        mixed_chunk: MixedChunk | None = None,
    ) -> None:
        """`choose_rows`: see Stages.choose. `grammars`: None on a node that accepts no grammars."""
        self.settings = settings
        self.widths = widths
        self.mixed_chunk = mixed_chunk or FixedChunk(settings.mixed_chunk_size)
        self.kv = kv
        self._new_step = new_step
        self._choose_rows = choose_rows
        self._freezer = PlanFreezer(kv, settings)
        self.queues = queues = Queues(kv, settings, tier)
        self.capacity = Capacity(kv, settings, queues)
        self._results = Results(settings, queues)
        self._grammars = grammars
        self._masks = MaskMaker(queues.requests, grammars.num_words if grammars is not None else 0, self.fail)
        self.budget = queues.budget
        self._no_room = NoRoom(queues.budget)
        self.requests = queues.requests
        self.waiting = queues.waiting
        self.prefilling = queues.prefilling
        self.running = queues.running
        self.granted = queues.granted
        self.handed_off = queues.handed_off
        self.ungranted = queues.ungranted
        self.counters = queues.counters
        self.oldest_offer: int | None = None  # decode node: the arrival of the oldest Offer that waits for memory
        self._last_was_prefill = False

    # ---- intake

    def submit(self, req: Request) -> None:
        """Queue a request, or end it immediately if it can never fit."""
        self.requests[req.key] = req
        try:
            self.constrain(req)
        except InvalidRequest as error:
            self.fail(req.key, error)
            return
        if not self.can_fit(req):
            self.fail(req.key, TooLarge(f"{req.num_tokens} tokens and an answer can never fit this node"))
            return
        if req.handoff_to is not None:
            self.queues.ungranted[req.key] = req
        self.queues.await_memory(req)

    @property
    def grammar_version(self) -> str:
        return self._grammars.version if self._grammars is not None else NO_GRAMMAR

    def close(self) -> None:
        self.queues.offload.close()
        if self._grammars is not None:
            self._grammars.close()

    def constrain(self, req: Request) -> None:
        """Start to compile the request's grammar, if any. Raise InvalidRequest if this node follows no grammars."""
        if req.sampling.grammar and req.constraint is None:
            if self._grammars is None:
                raise InvalidRequest(NO_GRAMMARS)
            req.constraint = self._grammars.constraint(req.sampling.grammar)

    def can_fit(self, req: Request) -> bool:
        return self.budget.can_ever_hold(req)

    def abort(self, key: RequestKey) -> None:
        """End a request in any state. Ignore an unknown key, because an abort may come late or twice."""
        req = self.requests.get(key)
        if req is not None:
            self.queues.end(req, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        for req in [req for req in self.requests.values() if req.deadline < now]:
            self.fail(req.key, DeadlineExceeded("the request's deadline passed"))

    def fail(self, key: RequestKey, error: BatonError) -> None:
        self.queues.fail(key, error)

    def retract(self, req: Request) -> None:
        self.queues.retract(req)

    def take_events(self) -> list[SchedEvent]:
        events, self.queues.events = self.queues.events, []
        return events

    # ---- hand-off, decode side

    def grant(self, req: Request, source: str) -> int | None:
        """Reserve a row and all pages for the KV of a grant from `source`, or reserve nothing (rule a).

        Return the number of cached prefix tokens, a multiple of the page size. Return None if there is no room now.
        Pages outside all sliding windows count as cached.
        """
        headroom = self.capacity.headroom()
        if self._no_room.is_still_so(req.key, headroom):
            return None
        ids = req.all_ids()
        first_needed = self.kv.cache.first_needed(len(ids))
        cached = self.budget.reserve(req, ids, self.settings.width, headroom, PageState.GRANTED, first_needed)
        if isinstance(cached, Shortage):
            self._no_room.note(req.key, headroom)
            return None
        req.cached_tokens = req.computed = cached
        req.to(S.GRANTED)
        self.requests[req.key] = req
        self.granted[req.key] = req
        self.queues.prefixes.begin(req, source)
        return cached

    def granted_arrived(self, req: Request, num_tokens: int) -> None:
        """Cache the first pages of a grant, unless it was revoked. Their KV must be in the pool."""
        if req.state is S.GRANTED:
            req.computed = num_tokens
            self.queues.remember(req)

    def process_prebuilt(self, arrivals: Sequence[Arrival]) -> Admission | None:
        """Add arrived rows to the running batch, without a forward.

        Each row's first token goes to the router again, and may end the row.
        """
        joining = [arrival for arrival in arrivals if self._accept_first_token(arrival)]
        if not joining:
            return None
        admission = build_admission(self._new_step(), joining, self.settings)
        self.queues.join([arrival.request for arrival in joining], admission.committed.tolist(), admission.step, 0)
        return admission

    def _accept_first_token(self, arrival: Arrival) -> bool:
        req = arrival.request
        del self.granted[req.key]
        self.kv.set_tag(req.row, PageState.ACTIVE)
        req.to(S.RUNNING)
        req.computed = arrival.committed
        self.queues.remember(req)
        emitted, reason = append_tokens(req, [arrival.token], arrival.logprobs)
        self.queues.events.append(emitted)
        if reason is not None:
            self.queues.end(req, reason)
        return reason is None

    def release_held(self, row: int) -> None:
        """Call this after the pull of the row's revoked grant has ended."""
        self.budget.release_held(row)

    # ---- hand-off, prefill side

    def set_granted(self, key: RequestKey) -> None:
        self.queues.ungranted.pop(key, None)

    def complete_handoff(self, key: RequestKey) -> None:
        """End a hand-off whose KV the decode node has. The pages stay cached."""
        req = self.requests.pop(key, None)
        if req is not None:
            self.queues.leave(req)

    # ---- cold tier

    def take_restored(self) -> Admission | None:
        """Readmit restored requests, and begin the next copies. Return an Admission of requests with complete KV."""
        offload = self.queues.offload
        whole = [restore.request for restore in offload.take_done() if self._came_back(restore)]
        offload.save_cold()
        if not whole:
            return None
        self.counters.readmissions += len(whole)
        arrivals = [Arrival(req, req.output_ids[-1], req.computed, (), {}) for req in whole]
        admission = build_admission(self._new_step(), arrivals, self.settings)
        self.queues.join(whole, admission.committed.tolist(), admission.step, 0)
        return admission

    def _came_back(self, restore: Restore) -> bool:
        req = restore.request
        req.computed = restore.num_tokens
        self.queues.remember(req)
        runs_alone = req in self.queues.suspects  # a suspect is computed in a separate chunk
        if runs_alone or req.computed < req.num_tokens - 1 or not req.output_ids or self.settings.relays_drafts:
            self.queues.begin_prefill(req, req.all_ids(), req.computed)
            return False
        req.to(S.RUNNING)
        return True

    # ---- planning

    def plan(self) -> StepPlan | None:
        """None if nothing can run now."""
        self._drop_left_rows()
        self.running.prepare_for_decode(self.settings.speculative)
        width = self.widths.choose(len(self.running))
        stepping = self.capacity.reserve_running(width)
        self._drop_left_rows()
        self.capacity.admit_waiting(self.oldest_offer)
        chunks: Sequence[ChunkedPrompt] = self.prefilling
        if self.queues.suspects:
            stepping, chunks = self._without_suspects(stepping)
        rows = np.asarray([i for i, req in enumerate(self.running.reqs) if req in stepping], dtype=np.int64)
        rows = self._choose_rows(rows, self.running.expect_step)
        if not self.settings.mix and chunks and not self._last_was_prefill:
            rows = rows[:0]  # steps alternate
        shares = [] if len(rows) and not self.settings.mix else self._share_chunks(chunks, mixed=len(rows) > 0)
        if not shares and not len(rows):
            return None
        self._last_was_prefill = bool(shares)
        return self._launchable(shares, rows, width)

    def _without_suspects(self, stepping: set[Request]) -> tuple[set[Request], list[ChunkedPrompt]]:
        """Return the rows and chunks that may share the next step, with at most one suspect.

        While a suspect's step is in flight, its row waits: the result may clear the suspect.
        """
        suspects, batch = self.queues.suspects, self.running
        ready = {req for req, open_steps in zip(batch.reqs, batch.in_flight, strict=True) if not open_steps}
        rows = {req for req in stepping if req in ready or req not in suspects}
        together = suspects.choose(rows | {chunk.request for chunk in self.prefilling})
        return rows & together, [chunk for chunk in self.prefilling if chunk.request in together]

    def _launchable(self, shares: list[ChunkShare], rows: Int64s, width: int) -> StepPlan:
        drafts_next = width > 1 or bool(shares) or not self.settings.relays_drafts
        if not self.running.can_draft[rows].all():
            width = 1
        step = self._new_step()
        plan = self._freezer.freeze(step, shares, self.running, rows, width, drafts_next)
        self.running.mark_planned(rows, step, width, self.settings.speculative, drafts_next)
        self._advance_chunks(shares, step)
        return plan

    def _drop_left_rows(self) -> None:
        keep = [i for i, req in enumerate(self.running.reqs) if req.state is S.RUNNING]
        self.running.filter_batch(np.asarray(keep, dtype=np.int64))

    def _share_chunks(self, chunks: Sequence[ChunkedPrompt], mixed: bool) -> list[ChunkShare]:
        budget = self.mixed_chunk.choose() if mixed else self.settings.chunk_size
        remaining = [chunk.remaining for chunk in chunks]
        urgent = [self.queues.prefixes.urgency(chunk.request, chunk.remaining) for chunk in chunks]
        shares = self.settings.prompts.share(remaining, urgent, budget)
        return [ChunkShare(chunk, q) for chunk, q in zip(chunks, shares, strict=True) if q]

    def _advance_chunks(self, shares: Sequence[ChunkShare], step: int) -> None:
        done = [share.chunk for share in shares if share.is_last]
        for share in shares:
            self.counters.prompt_tokens += share.q_len
            share.chunk.computed += share.q_len
            share.chunk.started = True
        self.queues.leave_prefilling(chunk.request for chunk in done)
        local = [chunk for chunk in done if chunk.request.handoff_to is None]
        for chunk in local:
            chunk.request.to(S.RUNNING)
        self.queues.join([chunk.request for chunk in local], [len(chunk.ids) for chunk in local], step, 1)

    # ---- results

    def launched(self, plan: StepPlan, layers: LayerMarks | None) -> None:
        """Announce a launched step's chunks, if KV is sent layer by layer."""
        if layers is None:
            return
        for row_id, num_tokens, emits in zip(plan.row_ids, plan.chunk_ends, plan.emits, strict=False):  # chunks first
            if row_id.key in self.requests:  # the request's grammar may have just failed
                self.queues.events.append(ChunkLaunched(row_id.key, num_tokens, bool(emits), layers))

    def masks_of(self, plan: StepPlan, drafts: HostDrafts | None) -> TokenMasks:
        """Call this after all earlier results are processed."""
        return self._masks.make(plan, drafts)

    def process(self, result: StepResult) -> None:
        self.widths.observe(result)
        self.mixed_chunk.observe(result)
        self._results.process(result)

    def resolve(self, lengths: Int64s) -> None:
        """Set the running rows' exact lengths (S6)."""
        self.running.seq_lens.set_exact(lengths)

    def to_blame(self, failed: Sequence[RowId], drained: Sequence[RowId]) -> list[Request]:
        return self._results.to_blame(failed, drained)

    def probe(self) -> StepPlan:
        return probe_plan(self._freezer, self.settings, self._new_step(), nobody=ScheduleBatch())

    def step_failed(self, failed: Sequence[RowId], drained: Sequence[RowId], error: BatonError) -> None:
        self._results.step_failed(failed, drained, error)
        self._drop_left_rows()
