"""The scheduler: which rows run in the next step. Sans-IO and single-threaded: no clock, no socket, no thread.

        submit -> WAITING -> PREFILLING -> RUNNING -> FINISHED          here from start to end
                                       \\-> HANDED_OFF -> FINISHED       prefill node, KV goes to a decode node
                   WAITING -> RESTORING -> PREFILLING or RUNNING        KV comes back from the cold tier
        grant  -> GRANTED -> RUNNING -> FINISHED                        decode node, KV comes from a prefill node

    queues   who is in which state, and the moves between      room      memory: who reserves, who gives way
    freeze   a step as values                                  results   what a step brought

`plan` touches no device; everything that may wait or raise (exact lengths) is done by the loop before it.
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
from shared.sched.prebuilt import Arrival, build_admission
from shared.sched.probe import probe_plan
from shared.sched.queues import Queues
from shared.sched.results import Results
from shared.sched.settings import SchedSettings
from shared.wire.fitting import NO_GRAMMAR

S = RequestState
NO_GRAMMARS = "no grammar is followed here: with --pp, by a model with an encoder or an unknown vocabulary"


class Scheduler:
    """The face of a node's requests: intake, hand-off, planning, results. `queues` owns them; its queues are named here
    too, for all who plan and for those who look."""

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
        """`choose_rows`: see Stages.choose. `grammars`: None where no request may have one. `mixed_chunk`: as large as
        the settings allow, when not given."""
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
        self.requests = queues.requests
        self.waiting = queues.waiting
        self.prefilling = queues.prefilling
        self.running = queues.running
        self.granted = queues.granted
        self.handed_off = queues.handed_off
        self.ungranted = queues.ungranted
        self.counters = queues.counters
        self.oldest_offer: int | None = None  # decode node: arrival of the Offer that waits for memory longest
        self._last_was_prefill = False

    # ---- intake

    def submit(self, req: Request) -> None:
        """Queue a request. One that can never fit ends at once with an error."""
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
        """Return what decides which tokens a grammar allows here; "none" where none is followed."""
        return self._grammars.version if self._grammars is not None else NO_GRAMMAR

    def close(self) -> None:
        """End the threads of the cold tier and of the grammars."""
        self.queues.offload.close()
        if self._grammars is not None:
            self._grammars.close()

    def constrain(self, req: Request) -> None:
        """Begin to compile the request's grammar, if it has one. Raise InvalidRequest where no grammar is followed."""
        if req.sampling.grammar and req.constraint is None:
            if self._grammars is None:
                raise InvalidRequest(NO_GRAMMARS)
            req.constraint = self._grammars.constraint(req.sampling.grammar)

    def can_fit(self, req: Request) -> bool:
        """Whether an empty node could run it to its end."""
        return self.budget.can_ever_hold(req)

    def abort(self, key: RequestKey) -> None:
        """Any state; unknown keys are legal (late or duplicate). Pages are free at once, or held by a pull."""
        req = self.requests.get(key)
        if req is not None:
            self.queues.end(req, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """End requests past their deadline."""
        for req in [req for req in self.requests.values() if req.deadline < now]:
            self.fail(req.key, DeadlineExceeded("the request's deadline passed"))

    def fail(self, key: RequestKey, error: BatonError) -> None:
        self.queues.fail(key, error)

    def retract(self, req: Request) -> None:
        """Give the row and pages back and begin again; see `Queues.retract`."""
        self.queues.retract(req)

    def take_events(self) -> list[SchedEvent]:
        events, self.queues.events = self.queues.events, []
        return events

    # ---- hand-off, decode side

    def grant(self, req: Request) -> int | None:
        """Reserve row and pages for a request whose KV will come, all or nothing (rule a applies). Returns the
        cached prefix in tokens, page aligned, or None: not now. What no window will reach counts as cached."""
        ids, headroom = req.all_ids(), self.capacity.headroom()
        first_needed = self.kv.cache.first_needed(len(ids))
        cached = self.budget.reserve(req, ids, self.settings.width, headroom, PageState.GRANTED, first_needed)
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
        """The pull into a revoked grant's pages is over."""
        self.budget.release_held(row)

    # ---- hand-off, prefill side

    def set_granted(self, key: RequestKey) -> None:
        """The decode node answered: the request no longer counts against the cap of ungranted pages."""
        self.queues.ungranted.pop(key, None)

    def complete_handoff(self, key: RequestKey) -> None:
        """The decode node has everything: our pages go to the prefix cache."""
        req = self.requests.pop(key, None)
        if req is not None:
            self.queues.leave(req)

    # ---- cold tier

    def take_restored(self) -> Admission | None:
        """Copies that have ended: requests whose KV is whole again go on by an admission, as PREBUILT ones do, the
        others compute what is missing. Begins the next copies."""
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
        """Whether there is nothing left to compute before its next token."""
        req = restore.request
        req.computed = restore.num_tokens
        self.queues.remember(req)
        runs_alone = req in self.queues.suspects  # by a chunk of its own, which an admission is not
        if runs_alone or req.computed < req.num_tokens - 1 or not req.output_ids or self.settings.relays_drafts:
            self.queues.begin_prefill(req, req.all_ids(), req.computed)
            return False
        req.to(S.RUNNING)
        return True

    # ---- planning

    def plan(self) -> StepPlan | None:
        """Plan the next step. Return None when nothing can run now."""
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
        """Rows and chunks of those who may share the next step; of the suspects that is at most one, alone. A row of
        theirs waits for the result of its step in flight, which may clear it."""
        suspects, batch = self.queues.suspects, self.running
        ready = {req for req, open_steps in zip(batch.reqs, batch.in_flight, strict=True) if not open_steps}
        rows = {req for req in stepping if req in ready or req not in suspects}
        together = suspects.choose(rows | {chunk.request for chunk in self.prefilling})
        return rows & together, [chunk for chunk in self.prefilling if chunk.request in together]

    def _launchable(self, shares: list[ChunkShare], rows: Int64s, width: int) -> StepPlan:
        step = self._new_step()
        plan = self._freezer.freeze(step, shares, self.running, rows, width)
        self.running.mark_planned(rows, step, width, self.settings.speculative)
        self._advance_chunks(shares, step)
        return plan

    def _drop_left_rows(self) -> None:
        keep = [i for i, req in enumerate(self.running.reqs) if req.state is S.RUNNING]
        self.running.filter_batch(np.asarray(keep, dtype=np.int64))

    def _share_chunks(self, chunks: Sequence[ChunkedPrompt], mixed: bool) -> list[ChunkShare]:
        budget = self.mixed_chunk.choose() if mixed else self.settings.chunk_size
        shares = self.settings.prompts.share([chunk.remaining for chunk in chunks], budget)
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
        """Announce the chunks of a launched step, where `layers` says how far the step is: pages go ahead by layer."""
        if layers is None:
            return
        for row_id, num_tokens, emits in zip(plan.row_ids, plan.chunk_ends, plan.emits, strict=False):  # chunks first
            if row_id.key in self.requests:  # its grammar may have ended it just now
                self.queues.events.append(ChunkLaunched(row_id.key, num_tokens, bool(emits), layers))

    def masks_of(self, plan: StepPlan, drafts: HostDrafts | None) -> TokenMasks:
        """Make the masks of a step before which all results are processed; see masks.py."""
        return self._masks.make(plan, drafts)

    def process(self, result: StepResult) -> None:
        """Take a step's tokens."""
        self.widths.observe(result)
        self.mixed_chunk.observe(result)
        self._results.process(result)

    def resolve(self, lengths: Int64s) -> None:
        """Take the exact lengths of the running rows (S6)."""
        self.running.seq_lens.set_exact(lengths)

    def to_blame(self, failed: Sequence[RowId], drained: Sequence[RowId]) -> list[Request]:
        """See `Results.to_blame`."""
        return self._results.to_blame(failed, drained)

    def probe(self) -> StepPlan:
        """Plan a step that belongs to no request; see probe.py."""
        return probe_plan(self._freezer, self.settings, self._new_step(), nobody=ScheduleBatch())

    def step_failed(self, failed: Sequence[RowId], drained: Sequence[RowId], error: BatonError) -> None:
        """A closure raised; see `Results.step_failed`."""
        self._results.step_failed(failed, drained, error)
        self._drop_left_rows()
