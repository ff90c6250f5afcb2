"""Simulate a node in virtual time: production scheduler and page accounting, and step times in place of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deploy.tools.plan.profile import StepShape
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.engine.plan import Admission, StepPlan, StepResult
from shared.sched.scheduler import Scheduler
from shared.sched.steps.prebuilt import Arrival

TokenOf = Callable[[RequestKey, int], int]  # (request, position of the output token) -> id


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0


@dataclass(frozen=True, slots=True)
class Launched:
    """A step or an admission. Admissions keep their place in the order of steps, but take no time."""

    work: StepPlan | Admission
    done_at: float


class TimedNode:
    """`seconds` is called when a step is launched, with its shape and future begin."""

    def __init__(
        self,
        clock: VirtualClock,
        scheduler: Scheduler,
        seconds: Callable[[StepShape, float], float],
        token_of: TokenOf,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._token_of = token_of
        self.scheduler = scheduler
        self._launched: deque[Launched] = deque()
        self.busy_until = 0.0
        self.busy_seconds = 0.0
        self._owed = 0.0
        self.num_prompt_tokens: dict[RequestKey, int] = {}

    def next_at(self) -> float | None:
        return self._launched[0].done_at if self._launched else None

    def turn(self) -> None:
        """Work like the overlap loop: process results, then plan while at most one step is open."""
        while self._launched and self._launched[0].done_at <= self._clock.now:
            work = self._launched.popleft().work
            if isinstance(work, StepPlan):
                self.scheduler.process(self._result(work))
        while sum(isinstance(one.work, StepPlan) for one in self._launched) <= 1:
            plan = self.scheduler.planner.plan()
            if plan is None:
                return
            begin = max(self._clock.now, self.busy_until)
            seconds = self._seconds(shape_of(plan), begin) + self._owed
            self._owed = 0.0
            self.busy_until = begin + seconds
            self.busy_seconds += seconds
            self._launched.append(Launched(plan, self.busy_until))

    def submit(self, req: Request) -> None:
        self.num_prompt_tokens[req.key] = len(req.ask.prompt_ids)
        self.scheduler.intake.submit(req)

    def grant(self, req: Request) -> int | None:
        self.num_prompt_tokens[req.key] = len(req.ask.prompt_ids)
        return self.scheduler.grants.grant(req, "")

    def admit(self, arrival: Arrival) -> None:
        admission = self.scheduler.grants.process_prebuilt([arrival])
        if admission is not None:
            self._launched.append(Launched(admission, max(self._clock.now, self.busy_until)))

    def owe(self, seconds: float) -> None:
        if self.busy_until > self._clock.now:
            self._owed += seconds

    def forget(self, key: RequestKey) -> None:
        self.num_prompt_tokens.pop(key, None)

    def _result(self, plan: StepPlan) -> StepResult:
        assert not plan.lengths_relayed  # nothing is drafted here
        seq_lens = plan.seq_lens_cpu + plan.q_lens
        tokens = [self._token(row_id.key, length) for row_id, length in zip(plan.row_ids, seq_lens, strict=True)]
        return StepResult.plain(plan, tokens)

    def _token(self, key: RequestKey, num_tokens: int) -> int:
        """Return the token after `num_tokens` tokens of prompt and answer. Within the prompt any id will do."""
        return self._token_of(key, max(0, num_tokens - self.num_prompt_tokens.get(key, num_tokens)))


def shape_of(plan: StepPlan) -> StepShape:
    before, lengths = plan.seq_lens_cpu[: plan.num_prefill], plan.q_lens[: plan.num_prefill].astype(np.int64)
    return StepShape(
        tokens=int(plan.q_lens.sum()),
        samples=int(plan.emits.sum()),
        pairs=int((lengths * before + lengths * (lengths + 1) // 2).sum()),
        keys=int(plan.seq_lens_cpu[plan.num_prefill :].sum()) + plan.batch_size - plan.num_prefill,
    )
