"""Plan the next step: which rows and chunks run in it, how wide, and how much of each prompt. Touches no device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set

import numpy as np

from shared.core.request import Request, RequestState
from shared.engine.plan import Int64s, StepPlan, StepResult
from shared.kv.manager import KVManager
from shared.model.math.interface import LayerMarks
from shared.sched.planning.capacity import Capacity
from shared.sched.requests.queues import Queues
from shared.sched.steps.batch import ScheduleBatch
from shared.sched.steps.chunking import ChunkedPrompt
from shared.sched.steps.draft_length import WidthChoice
from shared.sched.steps.events import ChunkLaunched, ContextOutgrown
from shared.sched.steps.freeze import ChunkShare, PlanFreezer
from shared.sched.steps.mixed_chunk import FixedChunk, MixedChunk
from shared.sched.steps.probe import probe_plan
from shared.sched.steps.settings import SchedSettings
from shared.sched.steps.short_rows import rows_near
from shared.sched.steps.slow_masks import NOBODY, rows_with_slow_masks

S = RequestState


class Planner:
    """Before `plan`, the loop does everything that may wait or raise."""

    def __init__(
        self,
        kv: KVManager,
        settings: SchedSettings,
        queues: Queues,
        capacity: Capacity,
        new_step: Callable[[], int],
        widths: WidthChoice,
        choose_rows: Callable[[Int64s, Int64s], Int64s],
        mixed_chunk: MixedChunk | None,
    ) -> None:
        """`choose_rows`: see Stages.choose."""
        self.widths = widths
        self.mixed_chunk = mixed_chunk or FixedChunk(settings.mixed_chunk_size)
        self._settings = settings
        self._queues = queues
        self._capacity = capacity
        self._new_step = new_step
        self._choose_rows = choose_rows
        self._freezer = PlanFreezer(kv, settings)
        self._last_was_prefill = False
        self._steps_s = deque([0.0, 0.0], 2)  # of the last steps without chunks; the shorter counts: one may be delayed

    def plan(self) -> StepPlan | None:
        """None if nothing can run now."""
        queues = self._queues
        queues.drop_left_rows()
        queues.running.prepare_for_decode(self._settings.speculative)
        width = self.widths.choose(len(queues.running))
        near = rows_near(self._settings.adapters.short_context, queues.running, width)
        self._begin_again(near.outgrown)
        stepping = self._capacity.reserve_running(width)
        queues.drop_left_rows()
        self._capacity.admit_waiting()
        chunks: Sequence[ChunkedPrompt] = queues.prefilling
        late, narrow = NOBODY
        if queues.running.constrained:
            late, narrow = rows_with_slow_masks(queues.running, min(self._steps_s))
        stepping -= late | near.waiting
        if queues.suspects:
            stepping, chunks = self._without_suspects(stepping)
        rows = np.asarray([i for i, req in enumerate(queues.running.reqs) if req in stepping], dtype=np.int64)
        rows = self._choose_rows(rows, queues.running.expect_step)
        if not self._settings.mix and chunks and not self._last_was_prefill:
            rows = rows[:0]  # steps alternate
        shares = [] if len(rows) and not self._settings.mix else self._share_chunks(chunks, mixed=len(rows) > 0)
        if not shares and not len(rows):
            return None
        self._last_was_prefill = bool(shares)
        return self._launchable(shares, rows, width, narrow | near.narrow)

    def _begin_again(self, outgrown: Sequence[Request]) -> None:
        for req in outgrown:
            self._queues.retract(req)
            self._queues.events.append(ContextOutgrown(req.key))

    def _without_suspects(self, stepping: set[Request]) -> tuple[set[Request], list[ChunkedPrompt]]:
        """Return the rows and chunks that may share the next step, with at most one suspect.

        While a suspect's step is in flight, its row waits: the result may clear the suspect.
        """
        queues = self._queues
        suspects, batch = queues.suspects, queues.running
        ready = {req for req, open_steps in zip(batch.reqs, batch.in_flight, strict=True) if not open_steps}
        rows = {req for req in stepping if req in ready or req not in suspects}
        together = suspects.choose(rows | {chunk.request for chunk in queues.prefilling})
        return rows & together, [chunk for chunk in queues.prefilling if chunk.request in together]

    def _launchable(self, shares: list[ChunkShare], rows: Int64s, width: int, narrow: Set[Request]) -> StepPlan:
        running = self._queues.running
        drafts_next = width > 1 or bool(shares) or not self._settings.drafts.relays_drafts
        if not running.can_draft[rows].all():
            width = 1
        step = self._new_step()
        plan = self._freezer.freeze(step, shares, running, rows, width, drafts_next, narrow)
        running.mark_planned(rows, step, width, self._settings.speculative, drafts_next)
        self._advance_chunks(shares, step)
        return plan

    def _share_chunks(self, chunks: Sequence[ChunkedPrompt], mixed: bool) -> list[ChunkShare]:
        budget = self.mixed_chunk.choose() if mixed else self._settings.chunk_size
        remaining = [chunk.remaining for chunk in chunks]
        urgent = [self._queues.prefixes.urgency(chunk.request, chunk.remaining) for chunk in chunks]
        shares = self._settings.prompts.share(remaining, urgent, budget)
        return [ChunkShare(chunk, q) for chunk, q in zip(chunks, shares, strict=True) if q]

    def _advance_chunks(self, shares: Sequence[ChunkShare], step: int) -> None:
        queues = self._queues
        done = [share.chunk for share in shares if share.is_last]
        for share in shares:
            queues.counters.prompt_tokens += share.q_len
            share.chunk.computed += share.q_len
            share.chunk.started = True
        queues.leave_prefilling(chunk.request for chunk in done)
        local = [chunk for chunk in done if chunk.request.handoff_to is None]
        for chunk in local:
            chunk.request.to(S.RUNNING)
        queues.join([chunk.request for chunk in local], [len(chunk.ids) for chunk in local], step, 1)

    def launched(self, plan: StepPlan, layers: LayerMarks | None) -> None:
        """Announce a launched step's chunks, if KV is sent layer by layer."""
        if layers is None:
            return
        for row_id, num_tokens, emits in zip(plan.row_ids, plan.chunk_ends, plan.emits, strict=False):  # chunks first
            self._queues.events.append(ChunkLaunched(row_id.key, num_tokens, bool(emits), layers))

    def probe(self) -> StepPlan:
        return probe_plan(self._freezer, self._settings, self._new_step(), nobody=ScheduleBatch())

    def observe(self, result: StepResult) -> None:
        """Learn from a processed step how wide and long the next should be, and how long masks may take."""
        self.widths.observe(result)
        self.mixed_chunk.observe(result)
        if not result.num_prefill:
            self._steps_s.append(result.seconds)
