"""Parts of answers that show prompts: echo, token ids, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from router.api.answer.answers import PromptLogprob, PromptLogprobs
from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import GenerationPlan, PromptJob
from router.api.answer.shapes import PromptShown, token_text
from router.text.chat.interface import Tokenizer
from router.text.detokenizer import Detokenizer
from shared.wire.messages import TokenLogprob


class Prompts:
    """Owned by one Generation. Scores arrive in order, beginning with a prompt's second token."""

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._scores: list[list[TokenLogprob]] = [[] for _ in plan.jobs]
        self._shown: dict[int, PromptShown] = {}

    def add_scores(self, job: int, scores: Sequence[TokenLogprob]) -> None:
        self._scores[job].extend(scores)

    @property
    def are_scored(self) -> bool:
        if self._plan.sampling.prompt_logprobs < 0:
            return True
        return all(len(job.ids) == len(own) + 1 for job, own in zip(self._plan.jobs, self._scores, strict=True))

    def shown(self, job: int) -> PromptShown:
        """Call this method once all scores have come."""
        if job not in self._shown:
            self._shown[job] = self._make(job)
        return self._shown[job]

    def _make(self, job: int) -> PromptShown:
        own, show = self._plan.jobs[job], self._plan.show
        return PromptShown(
            echo=own.echo,
            echoed=self._echoed(own, self._scores[job]) if show.echoes_logprobs else None,
            ids=own.ids if show.return_token_ids else None,
            logprobs=self._logprobs(own, self._scores[job]) if show.prompt_logprobs >= 0 else UNSET,
        )

    def _echoed(self, job: PromptJob, scores: Sequence[TokenLogprob]) -> Delta:
        """Return the echo. Cut each score to as many likeliest tokens as the answer shows."""
        detokenizer, num_chars, offsets = Detokenizer(self._tokenizer), 0, []
        for token in job.ids:
            offsets.append(num_chars)
            num_chars += len(detokenizer.feed(token))
        return Delta(
            ids=job.ids, logprobs=[first(own, self._plan.show.num_logprobs) for own in scores], offsets=offsets
        )

    def _logprobs(self, job: PromptJob, scores: Sequence[TokenLogprob]) -> PromptLogprobs:
        most = self._plan.show.prompt_logprobs
        return [None, *(self._entry(token, first(own, most)) for token, own in zip(job.ids[1:], scores, strict=True))]

    def _entry(self, token: int, own: TokenLogprob) -> dict[str, PromptLogprob]:
        ranked = zip(own.top_ids, own.top_logprobs, strict=True)
        entry = {
            str(i): PromptLogprob(value, rank, token_text(self._tokenizer, i))
            for rank, (i, value) in enumerate(ranked, 1)
        }
        return {str(token): PromptLogprob(own.logprob, None, token_text(self._tokenizer, token))} | entry


def first(scores: TokenLogprob, most: int) -> TokenLogprob:
    return TokenLogprob(scores.logprob, scores.top_ids[:most], scores.top_logprobs[:most])
