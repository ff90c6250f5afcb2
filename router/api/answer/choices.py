"""The choices of one request: what the nodes' news add to them. `absorb` runs for every token."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from router.api.answer.certifying import Certifying
from router.api.answer.choice_text import ChoiceText, Delta
from router.api.answer.generation_plan import GenerationPlan
from router.api.answer.prompts import Prompts
from router.api.answer.writer import Counts, Times
from router.dispatch.gateway import Gateway
from router.requests.effects import Failure, News, ScoredPrompt, Update
from router.requests.mailbox import Mailbox
from router.text.chat.interface import Tokenizer
from shared.core.states import FinishReason
from shared.observe.metrics import RequestMetrics
from shared.wire.messages import Fingerprint

Step = tuple[int, Delta]  # (choice index, what to add to the choice)


def add_delta(deltas: dict[int, Delta], index: int, delta: Delta) -> None:
    if index in deltas:
        deltas[index].add(delta)
    else:
        deltas[index] = delta


def one_by_one(update: Update) -> Iterator[Update]:
    for place, token in enumerate(update.ids):
        yield Update(update.rid, update.seq_index, (token,), update.logprobs[place : place + 1], None)
    if update.end is not None:
        yield Update(update.rid, update.seq_index, (), (), update.end)


def count_tokens(plan: GenerationPlan, choices: Sequence[ChoiceText], cached: Sequence[int]) -> Counts:
    """Return a request's counts so far. `cached`: the cached tokens of each prompt."""
    thinks = plan.show.form.thinks
    return Counts(
        prompt=sum(len(job.ids) for job in plan.jobs),
        answer=sum(choice.num_tokens for choice in choices),
        cached=sum(cached),
        reasoning=sum(choice.num_reasoning for choice in choices) if thinks else None,
    )


class Choices:
    """Owned by one Generation. Choice index = prompt * n + sequence."""

    def __init__(
        self,
        plan: GenerationPlan,
        tokenizer: Tokenizer,
        gateway: Gateway,
        metrics: RequestMetrics,
        arrived: float,
    ) -> None:
        self._plan = plan
        self._gateway = gateway
        self._metrics = metrics
        self._arrived = arrived
        self.texts = [
            ChoiceText(tokenizer, plan.sampling, plan.show, len(job.echo))
            for job in plan.jobs
            for _ in range(plan.num_sequences)
        ]
        self.prompts = Prompts(plan, tokenizer)
        self.times = Times(arrived, arrived, arrived)
        self.certifying: Certifying | None = None
        self.num_open = len(self.texts)
        self.num_waiting = len(self.texts)  # choices that wait for their first token
        self._last_token_at = [0.0] * len(self.texts)
        self._cached = [0] * len(plan.jobs)
        self._job_of: dict[str, int] = {}
        self._nodes: Mapping[str, Collection[Fingerprint]] = {}  # by rid, see Mailbox
        self.counts = partial(count_tokens, plan, self.texts, self._cached)  # a method would refer to `self`

    def follow(self, mailbox: Mailbox) -> None:
        self._job_of = {rid: job for job, rid in enumerate(mailbox.rids)}
        self._nodes = mailbox.nodes

    def num_prompt_tokens(self, rids: Collection[str]) -> int:
        return sum(len(self._plan.jobs[self._job_of[rid]].ids) for rid in rids)

    def absorb(self, batch: Sequence[News], *, each_token: bool) -> list[Step]:
        """Raise a failed request's error. `each_token`: make a Step of each, while a resumed stream catches up."""
        now = time.monotonic()
        deltas: dict[int, Delta] = {}
        steps: list[Step] = []
        for news in batch:
            if isinstance(news, Failure):
                raise news.error
            if isinstance(news, ScoredPrompt):
                self.prompts.add_scores(self._job_of[news.rid], news.logprobs)
                continue
            index = self._job_of[news.rid] * self._plan.num_sequences + news.seq_index
            if self._has_ended(index):
                continue
            if news.ids:
                self._observe(index, len(news.ids), now)
            if news.end is not None:
                self._note_cached(news.rid, news.end.cached_tokens)
            if each_token:
                steps += [(index, self._advance(index, one)) for one in one_by_one(news) if not self._has_ended(index)]
            else:
                add_delta(deltas, index, self._advance(index, news))
        return steps or list(deltas.items())

    def _has_ended(self, index: int) -> bool:
        return self.texts[index].finish_reason is not None

    def _advance(self, index: int, update: Update) -> Delta:
        choice = self.texts[index]
        delta = Delta() if self._plan.show.hides_answer else choice.feed(update.ids, update.logprobs)
        if update.end is not None and choice.finish_reason is None:
            reason = FinishReason.LENGTH if self._plan.show.hides_answer else FinishReason(update.end.reason)
            delta.add(choice.finish(reason))
        if self.certifying is not None:
            self.certifying.take_delta(index, delta, self._nodes[update.rid])
        if choice.finish_reason is not None:
            self.num_open -= 1
            if update.end is None:
                self._gateway.close_sequence(update.rid, update.seq_index)
        return delta

    def _observe(self, index: int, num_tokens: int, now: float) -> None:
        """The time since the last batch is divided equally among a batch's tokens."""
        if not self.have_begun:
            self._metrics.first_token(now - self._arrived)
            self.times.first = now
        self.times.last = now
        before = self._last_token_at[index]
        self.num_waiting -= not before
        self._last_token_at[index] = now
        if before:
            for _ in range(num_tokens):
                self._metrics.next_token((now - before) / num_tokens)

    def _note_cached(self, rid: str, cached_tokens: int) -> None:
        job = self._job_of[rid]
        limit = len(self._plan.jobs[job].ids)
        self._cached[job] = max(self._cached[job], min(cached_tokens, limit))

    @property
    def have_begun(self) -> bool:
        """Return whether a token of any choice has come."""
        return self.num_waiting < len(self.texts)

    @property
    def reasons(self) -> list[FinishReason]:
        """Return why choices have ended, so far."""
        return [choice.finish_reason for choice in self.texts if choice.finish_reason is not None]
