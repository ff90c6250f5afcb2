"""One tenant: name, limits, priority and rights, without keys."""

from __future__ import annotations

from dataclasses import dataclass

NO_LIMIT = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """`adapters`: usable LoRA adapters; None allows all. `sees_cluster`: whether the tenant may see nodes, metrics and
    other tenants' names."""

    name: str
    requests_per_minute: int = NO_LIMIT
    tokens_per_minute: int = NO_LIMIT
    priority: int = 0
    adapters: frozenset[str] | None = None
    sees_cluster: bool = False

    @property
    def limits(self) -> tuple[int, int]:
        """(requests, tokens) per minute."""
        return self.requests_per_minute, self.tokens_per_minute

    def may_use(self, adapter: str) -> bool:
        return self.adapters is None or adapter in self.adapters


EVERYBODY = Tenant("default", sees_cluster=True)  # the only tenant if clients share a key or need none
