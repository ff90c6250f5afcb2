"""The protocol of endpoints that generate text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.api.fields import B, FieldTable
from router.api.generation_plan import Contexts, GenerationPlan
from router.api.resolve import Resolver
from router.api.writer import AnswerFacts, Writer


class GenerationApi(Protocol[B]):
    table: FieldTable[B]

    def plan(self, body: B, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        """Raise InvalidRequest with the faulty field's name."""
        ...

    def skipped(self, body: B) -> Sequence[str]:
        """Return the paths of parsed values without effect."""
        ...

    def writer(self, body: B, facts: AnswerFacts) -> Writer: ...
