"""Write answers of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from router.api.answer.answers import Answer, Choice, Usage, usage_of
from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import UsageShown
from router.api.answer.shapes import NO_PROMPT, AnswerShape, PromptShown, list_or_unset
from router.api.answer.writer import COMMENT, ENCODER, SSE_HEADERS, AnswerFacts, sse_event
from router.http.errors import error_json
from shared.core.errors import BatonError

DONE_EVENT = b"data: [DONE]\n\n"


class ChoicesWriter:
    """See `router.api.answer.writer.Writer`."""

    headers: Sequence[tuple[bytes, bytes]] = SSE_HEADERS
    ping = COMMENT
    num_events = 0  # not numbered

    def __init__(self, shape: AnswerShape, facts: AnswerFacts) -> None:
        self._shape = shape
        self._facts = facts
        self._show = facts.plan.show
        self.answer_id = shape.id_prefix + facts.token

    def opening(self) -> bytes:
        num_choices = len(self._facts.plan.jobs) * self._facts.plan.num_sequences
        chunks = [self._shape.opening(index, self._prompt_shown(index)) for index in range(num_choices)]
        choices = [choice for choice in chunks if choice is not None]
        return b"".join([self._event(choice, is_first=not index) for index, choice in enumerate(choices)])

    def more(self, deltas: Mapping[int, Delta]) -> bytes:
        chunk = self._shape.chunk
        return b"".join([self._event(chunk(*step)) for step in deltas.items() if self._shows(step[1])])

    def _shows(self, delta: Delta) -> bool:
        has_text = delta.text or delta.parts
        return bool(has_text or delta.finish_reason or delta.logprobs or self._show.return_token_ids)

    def ending(self) -> bytes:
        if self._show.usage is UsageShown.NEVER:
            return DONE_EVENT
        return sse_event(self._encode(self._shape.chunk_object, [], usage=self._usage())) + DONE_EVENT

    def failed(self, error: BatonError) -> bytes:
        return sse_event(error_json(error))

    def whole(self, answers: Sequence[Delta]) -> bytes:
        choices = [self._shape.whole(index, delta, self._prompt_shown(index)) for index, delta in enumerate(answers)]
        return self._encode(self._shape.object, choices, usage=self._usage(), is_first=True)

    def _event(self, choice: Choice, *, is_first: bool = False) -> bytes:
        kind, usage = self._shape.chunk_object, self._chunk_usage()
        return sse_event(self._encode(kind, [choice], usage=usage, is_first=is_first))

    def _encode(
        self, kind: str, choices: list[Choice], *, usage: Usage | None | msgspec.UnsetType, is_first: bool = False
    ) -> bytes:
        on_top = self._facts.prompts.shown(0) if is_first and self._shape.prompt_on_top else NO_PROMPT
        return ENCODER.encode(
            Answer(
                id=self.answer_id,
                object=kind,
                created=self._facts.created,
                model=self._facts.plan.model,
                choices=choices,
                usage=usage,
                prompt_token_ids=list_or_unset(on_top.ids),
                prompt_logprobs=on_top.logprobs,
            )
        )

    def _chunk_usage(self) -> Usage | None | msgspec.UnsetType:
        if self._show.usage is UsageShown.ALWAYS:
            return self._usage()
        return UNSET if self._show.usage is UsageShown.NEVER else None

    def _usage(self) -> Usage:
        counts = self._facts.counts()
        return usage_of(counts.prompt, counts.answer, counts.cached, counts.reasoning)

    def _prompt_shown(self, index: int) -> PromptShown:
        if self._shape.prompt_on_top:
            return NO_PROMPT
        return self._facts.prompts.shown(index // self._facts.plan.num_sequences)
