"""What each path does. The only place that knows all of the API's parts; the server around it does not matter here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec
from prometheus_client import CollectorRegistry

from router.api.connection import Connection
from router.api.endpoint import until_hang_up
from router.api.errors import NotFound
from router.api.generation import Generation
from router.api.generation_plan import GenerationPlan
from router.api.parse import BodyParser
from router.api.resolve import Resolver
from router.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.api.shapes import ChatShape, CompletionShape
from router.gateway import Gateway
from router.registry import Registry
from router.text.interface import decode_ids
from shared.core.errors import ModelNotFound
from shared.observe.metrics import CONTENT_TYPE, RequestMetrics, render

T = TypeVar("T")
LONG_BODY_BYTES = 16_384  # above it, tokenizing could hold up other streams


class Handlers:
    """One method per path. `max_context` 0: what model and nodes allow."""

    def __init__(
        self,
        resolver: Resolver,
        gateway: Gateway,
        registry: Registry,
        metrics: RequestMetrics,
        prometheus: CollectorRegistry,
        *,
        max_context: int,
    ) -> None:
        self._resolver = resolver
        self._tokenizer = resolver.text.tokenizer
        self._gateway = gateway
        self._registry = registry
        self._metrics = metrics
        self._prometheus = prometheus
        self._max_context = max_context
        self._started = int(time.time())
        self._chat = BodyParser(ChatRequest)
        self._completion = BodyParser(CompletionRequest)
        self._tokenize = BodyParser(TokenizeRequest)
        self._detokenize = BodyParser(DetokenizeRequest)

    def max_context(self) -> int:
        """The smallest of what was configured, what the model was trained for and what a node holds."""
        return self._within(self._registry.max_context())

    def _within(self, context: int | None) -> int:
        limits = (self._max_context, self._tokenizer.facts.context_length, context or 0)
        return min(limit for limit in limits if limit)

    async def chat(self, connection: Connection) -> None:
        arrived = time.monotonic()
        raw = await connection.body(self._resolver.limits.max_body_bytes)

        def plan() -> GenerationPlan:
            body, common = cast(ChatRequest, self._chat.parse(raw)), self._within(self._registry.common_context())
            return self._resolver.chat(body, self.max_context(), common)

        async def work() -> None:
            ready = await in_time(raw, plan)
            shape = ChatShape(self._tokenizer, ready.show)
            await self._generation(ready, shape, arrived).run(connection)

        await until_hang_up(connection, work())

    async def completion(self, connection: Connection) -> None:
        arrived = time.monotonic()
        raw = await connection.body(self._resolver.limits.max_body_bytes)

        def plan() -> GenerationPlan:
            return self._resolver.completion(cast(CompletionRequest, self._completion.parse(raw)), self.max_context())

        async def work() -> None:
            ready = await in_time(raw, plan)
            shape = CompletionShape(self._tokenizer, ready.show)
            await self._generation(ready, shape, arrived).run(connection)

        await until_hang_up(connection, work())

    async def tokenize(self, connection: Connection) -> None:
        raw = await connection.body(self._resolver.limits.max_body_bytes)
        ids = await in_time(raw, lambda: self._resolver.tokenize(cast(TokenizeRequest, self._tokenize.parse(raw))))
        answer = {"count": len(ids), "max_model_len": self.max_context(), "tokens": ids}
        await connection.answer(200, msgspec.json.encode(answer))

    async def detokenize(self, connection: Connection) -> None:
        raw = await connection.body(self._resolver.limits.max_body_bytes)
        body = cast(DetokenizeRequest, self._detokenize.parse(raw))
        self._resolver.check_model(body.model)
        self._resolver.check_ids(body.tokens, "tokens")
        await connection.answer(200, msgspec.json.encode({"prompt": decode_ids(self._tokenizer, body.tokens)}))

    async def models(self, connection: Connection) -> None:
        await connection.answer(200, msgspec.json.encode({"object": "list", "data": self._model_cards()}))

    async def model(self, connection: Connection) -> None:
        name = str(connection.scope["path_params"]["model"])
        card = next((card for card in self._model_cards() if card["id"] == name), None)
        if card is None:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist", param="model")
        await connection.answer(200, msgspec.json.encode(card))

    async def health(self, connection: Connection) -> None:
        """This process answers; nothing is said about nodes."""
        await connection.answer(200, b'{"status":"ok"}')

    async def ready(self, connection: Connection) -> None:
        """200 while some node can take a request."""
        now = time.monotonic()
        nodes = [
            {
                "node": node.node_id,
                "role": node.role,
                "ready": node.can_take(now),
                "draining": node.is_draining,
                "silent": node.is_silent,
            }
            for node in self._registry
        ]
        misfits = [{"a": a, "b": b, "differs": name} for a, b, name in self._registry.misfits()]
        is_ready = not self._gateway.is_stopping and bool(self._registry.usable(now))
        roles = {node.role for node in self._registry.usable(now)}
        answer = {"ready": is_ready, "pair": is_ready and len(roles) == 2, "nodes": nodes, "misfits": misfits}
        await connection.answer(200 if is_ready else 503, msgspec.json.encode(answer))

    async def metrics(self, connection: Connection) -> None:
        await connection.answer(200, render(self._prometheus), [(b"content-type", CONTENT_TYPE.encode())])

    async def missing(self, connection: Connection) -> None:
        raise NotFound("there is nothing at this path")

    def _generation(self, plan: GenerationPlan, shape: ChatShape | CompletionShape, arrived: float) -> Generation:
        return Generation(plan, shape, self._tokenizer, self._gateway, self._metrics, arrived)

    def _model_cards(self) -> list[dict[str, object]]:
        """Adapters name the model as their parent."""
        base = self._resolver.model_name
        adapters = [self._model_card(name) | {"parent": base} for name in self._registry.adapters()]
        return [self._model_card(base), *adapters]

    def _model_card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "max_model_len": self.max_context(),
            "context_length": self.max_context(),
        }


async def in_time(raw: bytes, work: Callable[[], T]) -> T:
    """Short bodies at once, long ones on a thread, so that tokenizing never stops the other streams."""
    return work() if len(raw) < LONG_BODY_BYTES else await asyncio.to_thread(work)
