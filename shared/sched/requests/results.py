"""Apply a processed step to its requests.

A row is a zombie if its request ended or was retracted after planning. A zombie's results are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.core.errors import BatonError, IntegrityError
from shared.core.request import Request, RequestState
from shared.engine.plan import PromptScores, RowId, StepResult
from shared.sched.requests.output import append_tokens, entries_of, logprobs_of
from shared.sched.requests.queues import Queues
from shared.sched.steps.events import ChunkReady, PrefillDone, Scored
from shared.sched.steps.settings import SchedSettings

S = RequestState


class Results:
    def __init__(self, settings: SchedSettings, queues: Queues) -> None:
        self._settings = settings
        self._queues = queues

    def process(self, result: StepResult) -> None:
        queues = self._queues
        queues.counters.count_times(result)
        queues.counters.count_mixed(result)
        for scores in result.scores:
            self._scored(result.row_ids[scores.row], scores)
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

    def _scored(self, row_id: RowId, scores: PromptScores) -> None:
        """Report a prompt's scores once, even if the prompt begins again."""
        req = self._queues.requests.get(row_id.key)
        if req is None or req.incarnation != row_id.incarnation or req.first_unscored is None:
            return
        assert scores.first == req.first_unscored, f"{req.key}: {scores.first} scored, not {req.first_unscored}"
        self._queues.events.append(Scored(req.key, scores.first, entries_of(scores)))
        req.scored = scores.first + len(scores.logprobs)

    def _chunk_processed(self, req: Request, committed: int) -> None:
        self._computed(req, committed, is_prompt=True)
        if req.handoff_to is not None:
            self._queues.events.append(ChunkReady(req, committed))

    def _computed(self, req: Request, committed: int, *, is_prompt: bool) -> None:
        """Cache a prompt's new pages. Then free the pages that have left all sliding windows.

        No step reads these pages: steps in flight begin at `committed` or later. A decode node pulls only the KV that
        its own steps read.
        """
        req.computed = committed
        if is_prompt:
            self._queues.remember(req)
        self._queues.budget.kv.leave_behind(req.row, committed)

    def _tokens_processed(self, req: Request, result: StepResult, index: int) -> None:
        queues = self._queues
        if index >= result.num_prefill or req.handoff_to is not None:
            queues.suspects.clear(req)  # a local prompt stays suspect: its decode steps may fail
        committed = int(result.seq_lens[index])
        queues.running.on_processed(req, committed, result.stepped(index), self._settings.speculative)
        self._computed(req, committed, is_prompt=index < result.num_prefill)
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

    # ---- a step that failed

    def to_blame(self, failed: Sequence[RowId], drained: Sequence[RowId]) -> list[Request]:
        """Return the requests that end with a failed step, because they ran alone or can't begin again.

        `drained`: rows with a step in flight after the failed step.
        """
        queues = self._queues
        ending = [req for req in queues.living(failed) if req in queues.suspects or not self._can_begin_again(req)]
        return ending + [req for req in queues.living(drained) if not self._can_begin_again(req)]

    def _can_begin_again(self, req: Request) -> bool:
        """Return False for a hand-off whose layers are sent early, because a peer may have the failed step's KV."""
        return req.handoff_to is None or not self._settings.layer_ends

    def step_failed(self, failed: Sequence[RowId], drained: Sequence[RowId], error: BatonError) -> None:
        """Let all rows of a failed step begin again, each alone. End a row that already ran alone.

        `drained` rows and all other decode rows begin again together.
        """
        queues = self._queues
        for req in self.to_blame(failed, drained):
            queues.fail(req.key, error)
        suspects = queues.living(failed)
        for req in suspects:
            queues.suspects.add(req)
        for req in [*suspects, *queues.living(drained), *queues.running.reqs]:
            self._begin_again(req)
        queues.drop_left_rows()

    def _begin_again(self, req: Request) -> None:
        if req.handoff_to is None and req.state in (S.RUNNING, S.PREFILLING):
            self._queues.retract(req)
        elif req.state is S.PREFILLING:
            self._queues.rewind(req)
