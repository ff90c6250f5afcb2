"""The protocol of endpoints that generate text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.answer.writer import AnswerFacts, Writer
from router.api.ask.resolve import Resolver
from router.api.fields.fields import B, FieldTable


class GenerationApi(Protocol[B]):
    table: FieldTable[B]

    def plan(self, body: B, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        """Raise InvalidRequest with the faulty field's name."""
        ...

    def skipped(self, body: B) -> Sequence[str]:
        """Return the paths of parsed values without effect."""
        ...

    def writer(self, body: B, facts: AnswerFacts) -> Writer: ...
