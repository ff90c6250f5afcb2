"""What an endpoint that generates text is made of. Its file holds all three; handlers.py runs it."""

from __future__ import annotations

from typing import Protocol

from router.api.fields import B, FieldTable
from router.api.generation_plan import Contexts, GenerationPlan, ShowOptions
from router.api.resolve import Resolver
from router.api.shapes import Shape
from router.text.interface import Tokenizer


class GenerationApi(Protocol[B]):
    table: FieldTable[B]

    def plan(self, body: B, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        """Return what the request comes down to. Raise InvalidRequest that names the field at fault."""
        ...

    def shape(self, tokenizer: Tokenizer, show: ShowOptions) -> Shape:
        """Return who writes the answer's deltas as JSON."""
        ...
