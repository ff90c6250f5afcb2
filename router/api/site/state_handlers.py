"""The handlers of paths that tell the cluster's state: health, readiness and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry

from router.api.endpoint import keys_of
from router.fleet.registry import Registry
from router.http.connection import Connection
from router.http.errors import Unauthorized
from router.tenants.book import Tenants
from shared.observe.metrics import CONTENT_TYPE, render


@dataclass(frozen=True, slots=True)
class StateHandlers:
    """Keys in `tenants` or `operators` may see nodes and metrics."""

    registry: Registry
    is_stopping: Callable[[], bool]
    prometheus: CollectorRegistry
    tenants: Tenants
    operators: Tenants

    async def health(self, connection: Connection) -> None:
        await connection.answer(200, b'{"status":"ok"}')

    async def ready(self, connection: Connection) -> None:
        """Answer 200 while a node can take requests."""
        now = time.monotonic()
        roles = {node.role for node in self.registry.usable(now)}
        is_ready = not self.is_stopping() and bool(roles)
        answer: dict[str, object] = {"ready": is_ready, "pair": is_ready and len(roles) == 2}
        if self._may_see(connection):
            answer |= self._seen_nodes(now)
        await connection.answer(200 if is_ready else 503, msgspec.json.encode(answer))

    def _seen_nodes(self, now: float) -> dict[str, object]:
        nodes = [
            {
                "node": node.node_id,
                "role": node.role,
                "ready": node.can_take(now),
                "draining": node.is_draining,
                "silent": node.is_silent,
            }
            for node in self.registry
        ]
        return {"nodes": nodes, **self.registry.misfit_status(now)}

    def _may_see(self, connection: Connection) -> bool:
        try:
            self._check_seer(connection)
        except Unauthorized:
            return False
        return True

    def _check_seer(self, connection: Connection) -> None:
        given = keys_of(connection)
        tenant = self.tenants.find(given)
        is_seer = tenant is not None and tenant.sees_cluster
        is_operator = self.operators.asks_for_keys and self.operators.find(given) is not None
        if not is_seer and not is_operator:
            raise Unauthorized("send a key that may see the cluster's state, as Authorization: Bearer KEY")

    async def metrics(self, connection: Connection) -> None:
        self._check_seer(connection)
        await connection.answer(200, render(self.prometheus), [(b"content-type", CONTENT_TYPE.encode())])
