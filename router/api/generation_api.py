"""What an endpoint that generates text is made of. Its file holds all of it; handlers.py runs it."""

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
        """Return what the request comes down to. Raise InvalidRequest that names the field at fault."""
        ...

    def skipped(self, body: B) -> Sequence[str]:
        """Return the paths of what was parsed and has no effect, to be named in the answer's header."""
        ...

    def writer(self, body: B, facts: AnswerFacts) -> Writer:
        """Return who writes the answer."""
        ...
