"""The tenants' metrics on /metrics. Callers pass names, not keys or limits."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter


class TenantMetrics:
    """The keys file limits the number of tenants, and so the number of labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "baton_tenant_tokens_total",
            "Prompt and answer tokens of a tenant's requests",
            ["tenant"],
            registry=registry,
        )
        self._refused = Counter(
            "baton_tenant_refused_total",
            "Requests of a tenant that were refused for now, by error code",
            ["tenant", "code"],
            registry=registry,
        )
        self._seen: set[str] = set()
        self._codes: set[tuple[str, str]] = set()

    def used(self, tenant: str, num_tokens: int) -> None:
        self._seen.add(tenant)
        self._tokens.labels(tenant).inc(num_tokens)

    def refused(self, tenant: str, code: str) -> None:
        """`code`: one of our error codes, never a client's text."""
        self._codes.add((tenant, code))
        self._refused.labels(tenant, code).inc()

    def keep(self, names: Collection[str]) -> None:
        for name in [name for name in self._seen if name not in names]:
            self._seen.discard(name)
            self._tokens.remove(name)
        for gone in [one for one in self._codes if one[0] not in names]:
            self._codes.discard(gone)
            self._refused.remove(*gone)
