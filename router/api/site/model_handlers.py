"""The handlers of paths that list models."""

from __future__ import annotations

import time
from dataclasses import asdict

import msgspec

from router.api.ollama.ollama_models import SHOW, running, shown_model, tags
from router.api.site.body_reader import BodyReader
from router.api.site.served_model import ServedModel
from router.http.connection import Connection
from router.tenants.tenant import Tenant


class ModelHandlers:
    def __init__(self, model: ServedModel, bodies: BodyReader) -> None:
        self._model, self._bodies = model, bodies
        self._show = bodies.parser(SHOW)
        self._started = int(time.time())

    async def models(self, connection: Connection) -> None:
        cards = self._cards(connection.tenant)
        await connection.answer(200, msgspec.json.encode({"object": "list", "data": cards}))

    async def model(self, connection: Connection) -> None:
        name = str(connection.scope["path_params"]["model"])
        self._model.resolver.for_tenant(connection.tenant).check_model(name)
        card = next(card for card in self._cards(connection.tenant) if card["id"] == name)
        await connection.answer(200, msgspec.json.encode(card))

    async def ollama_tags(self, connection: Connection) -> None:
        await connection.answer(200, msgspec.json.encode(tags(self._cards(connection.tenant))))

    async def ollama_running(self, connection: Connection) -> None:
        is_up = any(True for _ in self._model.registry.usable(time.monotonic()))
        cards = self._cards(connection.tenant) if is_up else []
        await connection.answer(200, msgspec.json.encode(running(cards)))

    async def ollama_show(self, connection: Connection) -> None:
        cards, resolver = self._cards(connection.tenant), self._model.resolver_for(connection.tenant)
        await self._bodies.answer(connection, self._show, lambda body: shown_model(body, cards, resolver))

    def _cards(self, tenant: Tenant) -> list[dict[str, object]]:
        resolver = self._model.resolver
        own = [self._card(name) for name in resolver.names]
        names = resolver.for_tenant(tenant).adapters()
        return own + [self._card(name) | {"parent": resolver.model_name} for name in names]

    def _card(self, name: str) -> dict[str, object]:
        weights = self._model.registry.weights()
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "max_model_len": self._model.max_context(),
            "context_length": self._model.max_context(),
            "sampling_defaults": asdict(self._model.resolver.defaults),
            "weights": weights and msgspec.structs.asdict(weights),
        }
