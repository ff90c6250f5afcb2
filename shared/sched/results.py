"""From a processed step to requests: tokens, ends, finished chunks, and what a failed step costs whom.

Rows that ended, or began a new incarnation, since the step was planned are zombies: their results are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.core.errors import BatonError, IntegrityError
from shared.core.request import Request, RequestState
from shared.engine.plan import RowId, StepResult
from shared.sched.events import ChunkReady, PrefillDone
from shared.sched.output import append_tokens, logprobs_of
from shared.sched.queues import Queues
from shared.sched.settings import SchedSettings

S = RequestState


class Results:
    """Takes results in the order of their steps."""

    def __init__(self, settings: SchedSettings, queues: Queues) -> None:
        self._settings = settings
        self._queues = queues

    def process(self, result: StepResult) -> None:
        queues = self._queues
        queues.counters.count_times(result)
        for index, row_id in enumerate(result.row_ids):
            req = queues.requests.get(row_id.key)
            if req is None or req.incarnation != row_id.incarnation or req.state in (S.WAITING, S.FINISHED):
                continue
            if not result.tag_ok[index]:
                error = IntegrityError(f"step {result.step} read a relay row that another step had written")
                queues.fail(req.key, error)
            elif result.accept_lens[index] == 0:
                self._chunk_processed(req, int(result.seq_lens[index]))
            else:
                self._tokens_processed(req, result, index)

    def _chunk_processed(self, req: Request, committed: int) -> None:
        self._computed(req, committed)
        if req.handoff_to is not None:
            self._queues.events.append(ChunkReady(req, committed))

    def _computed(self, req: Request, committed: int) -> None:
        """Steps in flight begin here or later; a decode node asks for what is read behind the whole prompt."""
        req.computed = committed
        self._queues.budget.kv.leave_behind(req.row, committed)

    def _tokens_processed(self, req: Request, result: StepResult, index: int) -> None:
        queues = self._queues
        committed = int(result.seq_lens[index])
        queues.running.on_processed(req, committed, result.stepped(index), self._settings.speculative)
        req.computed = committed
        if index < result.num_prefill:
            queues.remember(req)
        self._computed(req, committed)
        run = result.tokens[index, : result.accept_lens[index]].tolist()
        emitted, reason = append_tokens(req, run, logprobs_of(req, result, index))
        queues.events.append(emitted)
        queues.counters.count_run(result, index, len(emitted.ids))
        if reason is not None:
            queues.end(req, reason)
        elif req.state is S.PREFILLING:
            req.to(S.HANDED_OFF)
            queues.handed_off[req.key] = req
            draft_state = {name: value[index] for name, value in result.draft_state.items()}
            queues.events.append(PrefillDone(req, emitted.ids[0], committed, emitted.logprobs, draft_state))

    def step_failed(self, failed: Sequence[RowId], drained: Sequence[RowId], error: BatonError) -> None:
        """A closure raised. The requests of that step fail; the others that had a step in flight (`drained`) start
        again, but for hand-offs, whose pages are promised to a peer: they fail too."""
        queues = self._queues
        for req in queues.living(failed):
            queues.fail(req.key, error)
        for req in queues.living(drained):
            if req.handoff_to is not None:
                queues.fail(req.key, error)
            elif req.state in (S.RUNNING, S.PREFILLING):
                queues.retract(req)
        for req in queues.running.reqs:
            if req.state is S.RUNNING:
                queues.retract(req)
