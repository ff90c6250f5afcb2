"""The model that all endpoints ask for: its texts, and how many tokens its nodes take now."""

from __future__ import annotations

from dataclasses import replace

from router.api.answer.generation_plan import Contexts
from router.api.ask.resolve import Resolver, chars_per_token
from router.fleet.registry import Registry
from router.tenants.tenant import Tenant


class ServedModel:
    def __init__(self, resolver: Resolver, registry: Registry, most_context: int = 0) -> None:
        """`most_context`: tokens; 0 if only model and nodes limit the context."""
        self.resolver, self.registry = resolver, registry
        self._most_context = most_context
        self._chars_per_token = chars_per_token(resolver.text.tokenizer)

    def max_context(self) -> int:
        return self._within(self.registry.max_context())

    def contexts(self) -> Contexts:
        return Contexts(self.max_context(), self._within(self.registry.common_context()))

    def _within(self, context: int | None) -> int:
        limits = (self._most_context, self.resolver.text.tokenizer.facts.context_length, context or 0)
        return min(limit for limit in limits if limit)

    def resolver_for(self, tenant: Tenant) -> Resolver:
        max_chars = self._chars_per_token * self.max_context()
        why = self.registry.why_no_grammar()
        return replace(self.resolver.for_tenant(tenant), max_chars=max_chars, no_grammar=why)
