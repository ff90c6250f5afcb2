"""Who asks: a tenant's or operator's name, limits, priority and rights, without keys."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

NO_LIMIT = 0
SEE, DRAIN, CHANGE = RIGHTS = ("see", "drain", "change")  # what an operator's key may do at /admin


@dataclass(frozen=True, slots=True)
class Tenant:
    """`adapters`: usable LoRA adapters; None allows all. `sees_cluster`: whether the tenant may see nodes, metrics and
    other tenants' names. `rights`: an operator's, at /admin; tenants' keys open nothing there."""

    name: str
    requests_per_minute: int = NO_LIMIT
    tokens_per_minute: int = NO_LIMIT
    priority: int = 0
    adapters: frozenset[str] | None = None
    sees_cluster: bool = False
    rights: tuple[str, ...] = ()

    @property
    def limits(self) -> tuple[int, int]:
        """(requests, tokens) per minute."""
        return self.requests_per_minute, self.tokens_per_minute

    @property
    def number(self) -> int:
        """Return what nodes know of the tenant instead of its name; 0 if it is everybody."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=8, person=b"tenant").digest()
        return 0 if self.name == EVERYBODY.name else int.from_bytes(digest)

    def may_use(self, adapter: str) -> bool:
        return self.adapters is None or adapter in self.adapters


EVERYBODY = Tenant("default", sees_cluster=True, rights=RIGHTS)  # the only one if clients share a key or need none
ADMIN = Tenant("admin", sees_cluster=True, rights=RIGHTS)  # who has the only key for /admin
