"""The handlers of all paths except /admin."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from router.api.answer_span import AnswerSpan, BodyTimes, begin_answer, refusals_traced
from router.api.chat import Chat
from router.api.chat_task import tell_form
from router.api.completions import Completions
from router.api.endpoint import Handler, keys_of, until_hang_up
from router.api.fields import B, FieldTable, known_fields
from router.api.generation import Generation
from router.api.generation_api import GenerationApi
from router.api.generation_plan import Contexts, GenerationPlan
from router.api.json_shape import check_shape
from router.api.messages import COUNT_TOKENS, FUNCTIONS, Messages, counted
from router.api.ollama import OllamaChat, OllamaGenerate
from router.api.ollama_models import SHOW, running, shown_model, tags
from router.api.parse import BodyParser
from router.api.resolve import Resolver, chars_per_token
from router.api.responses import Responses
from router.api.stream_start import StreamStart, begin_stream, digest_of_body
from router.api.stream_token import Signer
from router.api.structured import asks_for_grammar
from router.api.tokenization import DETOKENIZE, TOKENIZE, detokenized, tokenized, tokenizer_info
from router.certify.signing import FLAG as CERTIFICATE_FLAG
from router.certify.signing import AnswerSigner
from router.dispatch.gateway import Gateway
from router.fleet.registry import Registry
from router.http.body_budget import BodyHold
from router.http.check_thread import CheckThread
from router.http.connection import Connection
from router.http.errors import Unauthorized
from router.http.ignored import IGNORED, names_in_header
from router.http.kept_answers import REPLAYED, KeptAnswers, name_of_request
from router.http.work_threads import BodyWork
from router.queue.desk import Desk
from router.tenants.book import Tenants
from router.tenants.tenant import Tenant
from router.tools.declared import skipped_tools
from shared.core.errors import BatonError, InvalidRequest
from shared.observe.log_once import LogOnce
from shared.observe.metrics import CONTENT_TYPE, RequestMetrics, render
from shared.observe.tracer import Tracer

CERTIFICATE = b"x-certificate"
STREAM_IDS = b"x-stream-ids"  # event ids are opt-in, because many clients expect one data line per event
APIS: tuple[GenerationApi[Any], ...] = (Chat(), Completions(), Messages(), Responses(), OllamaChat(), OllamaGenerate())
NO_CERTIFICATES = (
    f"this server signs no certificates: its operator must start the router with {CERTIFICATE_FLAG} FILE, which `baton "
    "keys certificate FILE` makes"
)
KNOWN_FIELDS = known_fields([*(api.table for api in APIS), COUNT_TOKENS, TOKENIZE, DETOKENIZE, SHOW])


@dataclass(slots=True)
class Asked:
    api: GenerationApi[Any]
    raw: bytes
    hold: BodyHold  # ends when `raw` is dropped
    times: BodyTimes
    body: Any = None

    def drop_raw(self) -> None:
        self.raw = b""
        self.hold.let_go()

    def drop(self) -> None:
        self.body = None
        self.drop_raw()

    def moved(self) -> Asked:
        """Move the request to work that outlives its exchange. This work must call `drop`."""
        moved = replace(self, hold=self.hold.another())
        self.drop()
        return moved


class Handlers:
    """`max_context`: 0 if only model and nodes limit the context. Keys in `tenants` or `operators` may see nodes and
    metrics.

    It has many fields because the endpoints share one application.
    """

    def __init__(
        self,
        resolver: Resolver,
        gateway: Gateway,
        registry: Registry,
        metrics: RequestMetrics,
        prometheus: CollectorRegistry,
        *,
        max_context: int,
        strict_fields: bool = False,
        max_json_depth: int = 128,
        tenants: Tenants,
        operators: Tenants,
        desk: Desk,
        signer: Signer,
        once: LogOnce,
        answers: AnswerSigner | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`once` logs each kind of event once. `answers` signs certificates; None if the router has no key for them."""
        self._signer, self._answers = signer, answers
        self._tracer, self._once = tracer, once
        self._kept = KeptAnswers(time.monotonic)
        self._resolver = resolver
        self._tokenizer = resolver.text.tokenizer
        self._chars_per_token = chars_per_token(self._tokenizer)
        self._gateway = gateway
        self._registry = registry
        self._metrics = metrics
        self._prometheus = prometheus
        self._max_context = max_context
        self._started = int(time.time())
        self._strict_fields = strict_fields
        self._max_json_depth = max_json_depth
        self._tenants, self._operators, self._desk = tenants, operators, desk
        self._work = BodyWork()
        self._checks = CheckThread()
        self._count_tokens = self._parser(COUNT_TOKENS)
        self._tokenize = self._parser(TOKENIZE)
        self._detokenize = self._parser(DETOKENIZE)
        self._show = self._parser(SHOW)

    def max_context(self) -> int:
        return self._within(self._registry.max_context())

    def _within(self, context: int | None) -> int:
        limits = (self._max_context, self._tokenizer.facts.context_length, context or 0)
        return min(limit for limit in limits if limit)

    def _resolver_for(self, connection: Connection) -> Resolver:
        max_chars = self._chars_per_token * self.max_context()
        why = self._registry.why_no_grammar()
        return replace(self._resolver.for_tenant(connection.tenant), max_chars=max_chars, no_grammar=why)

    def generating(self) -> dict[str, Handler]:
        return {api.table.path: partial(self._generate, api, self._parser(api.table)) for api in APIS}

    async def _generate(self, api: GenerationApi[Any], parser: BodyParser[Any], connection: Connection) -> None:
        arrived, path = time.monotonic(), api.table.path
        with refusals_traced(self._tracer, path, arrived, connection):
            raw = await connection.body(self._resolver.limits.max_body_bytes)
        asked = Asked(api, raw, connection.body_hold, BodyTimes(arrived, time.monotonic()))
        del raw

        def parse() -> None:
            asked.body = self._parsed(parser, asked.raw, connection, api.skipped)
            if connection.header(CERTIFICATE) is not None:
                asked.body = with_certificate(asked.body, api.table.path)
            connection.name(asked.body.request_id)

        async def work() -> None:
            key = connection.header(b"idempotency-key")
            await self._work.turn()
            with refusals_traced(self._tracer, path, arrived, connection):
                if key is None:  # a kept answer needs no room
                    with self._desk.refusals(connection.tenant):
                        self._gateway.check_room(connection.tenant)
                await self._work.in_time(asked.raw, parse, asked.hold)
            if key is None or asked.body.stream:
                await self._run(asked, connection)
            else:
                await self._answer_once(asked, connection, key)

        await until_hang_up(connection, work())

    async def _run(self, asked: Asked, connection: Connection) -> None:
        api, body, times = asked.api, asked.body, asked.times
        with refusals_traced(self._tracer, api.table.path, times.arrived, connection):
            plan, start = await self._planned(asked, connection)
            asked.drop_raw()
            headers = connection.more_headers
            headers.update(plan.headers)
            tell_form(self._once, headers)
            bill = self._desk.charge(connection.tenant, plan.cost, headers.update)
        with bill:
            generation = Generation(
                plan,
                partial(api.writer, body),
                self._tokenizer,
                self._gateway,
                self._metrics,
                times.arrived,
                start,
                self._answers,
                self._begin_span(plan, asked, connection),
            )
            try:
                await generation.run(connection)
            finally:
                bill.was_admitted, bill.num_used = generation.was_admitted, generation.num_used

    async def _planned(self, asked: Asked, connection: Connection) -> tuple[GenerationPlan, StreamStart | None]:
        api, body = asked.api, asked.body
        contexts = Contexts(self.max_context(), self._within(self._registry.common_context()))
        last_event_id, has_ids = connection.header(b"last-event-id"), connection.header(STREAM_IDS) is not None
        is_resumable = api.table.has_event_ids and (has_ids or last_event_id is not None)

        resolver = self._resolver_for(connection)

        def plan() -> tuple[GenerationPlan, StreamStart | None]:
            made = api.plan(body, resolver, contexts)
            if made.is_certified and self._answers is None:
                raise InvalidRequest(NO_CERTIFICATES, param="certificate")
            if not made.show.stream or not is_resumable:
                return made, None
            return begin_stream(api.table.path, body, made, self._signer, last_event_id)

        if asks_for_grammar(body):
            return await self._checks.run(plan, asked.hold)
        return await self._work.in_time(asked.raw, plan, asked.hold)

    def _begin_span(self, plan: GenerationPlan, asked: Asked, connection: Connection) -> AnswerSpan | None:
        if self._tracer is None:
            return None
        path, request_id = asked.api.table.path, connection.request_id
        return begin_answer(self._tracer, path, plan, asked.times, request_id, connection.trace)

    async def _answer_once(self, asked: Asked, connection: Connection, key: str) -> None:
        """A hang-up does not stop the work, so a retry gets the answer."""
        path, body = asked.api.table.path, asked.body
        with refusals_traced(self._tracer, path, asked.times.arrived, connection):
            name = name_of_request(keys_of(connection), key)
            digest = await self._work.in_time(asked.raw, partial(digest_of_body, path, body), asked.hold)
            answer, is_again = self._kept.answer(name, digest, lambda: self._make(asked.moved(), connection))
        del body  # a repeated request waits without its body
        asked.drop()
        data = await answer
        if is_again:
            connection.more_headers[REPLAYED] = b"true"
            self._metrics.replayed()
        await connection.answer(200, data)

    async def _make(self, asked: Asked, connection: Connection) -> bytes:
        connection.was_admitted = True  # this method counts refusals, not the endpoint
        unsent = connection.unsent()
        try:
            await self._run(asked, unsent)
        except BatonError as error:
            if not unsent.was_admitted:
                self._metrics.refused(error.code)
            raise
        finally:
            asked.drop()
        return unsent.data

    def _parser(self, table: FieldTable[B]) -> BodyParser[B]:
        return BodyParser(table, strict=self._strict_fields)

    def _parsed(
        self, parser: BodyParser[B], raw: bytes, connection: Connection, skipped: Callable[[B], Sequence[str]]
    ) -> B:
        check_shape(raw, self._max_json_depth)
        parsed = parser.parse(raw)
        ignored = (*parsed.ignored, *skipped(parsed.body))
        if ignored:
            connection.more_headers[IGNORED] = names_in_header(ignored)
            for name in ignored:
                self._metrics.ignored_field(name if name in KNOWN_FIELDS else "other")
        return parsed.body

    async def _answer(
        self,
        connection: Connection,
        parser: BodyParser[B],
        make: Callable[[B], object],
        skipped: Callable[[B], Sequence[str]] = lambda body: (),
    ) -> None:
        raw = await connection.body(self._resolver.limits.max_body_bytes)

        def work() -> bytes:
            return msgspec.json.encode(make(self._parsed(parser, raw, connection, skipped)))

        await self._work.turn()
        data = await self._work.in_time(raw, work, connection.body_hold)
        tell_form(self._once, connection.more_headers)
        await connection.answer(200, data)

    async def count_tokens(self, connection: Connection) -> None:
        make = partial(counted, resolver=self._resolver_for(connection), headers=connection.more_headers)
        await self._answer(connection, self._count_tokens, make, lambda body: skipped_tools(body.tools, FUNCTIONS))

    async def tokenize(self, connection: Connection) -> None:
        resolver, headers = self._resolver_for(connection), connection.more_headers
        make = partial(tokenized, resolver=resolver, max_context=self.max_context(), headers=headers)
        await self._answer(connection, self._tokenize, make)

    async def detokenize(self, connection: Connection) -> None:
        resolver = self._resolver_for(connection)
        await self._answer(connection, self._detokenize, partial(detokenized, resolver=resolver))

    async def tokenizer_info(self, connection: Connection) -> None:
        await connection.answer(200, msgspec.json.encode(tokenizer_info(self._resolver.text)))

    async def models(self, connection: Connection) -> None:
        cards = self._model_cards(connection.tenant)
        await connection.answer(200, msgspec.json.encode({"object": "list", "data": cards}))

    async def model(self, connection: Connection) -> None:
        name = str(connection.scope["path_params"]["model"])
        self._resolver.for_tenant(connection.tenant).check_model(name)
        card = next(card for card in self._model_cards(connection.tenant) if card["id"] == name)
        await connection.answer(200, msgspec.json.encode(card))

    async def ollama_tags(self, connection: Connection) -> None:
        await connection.answer(200, msgspec.json.encode(tags(self._model_cards(connection.tenant))))

    async def ollama_running(self, connection: Connection) -> None:
        is_up = any(True for _ in self._registry.usable(time.monotonic()))
        cards = self._model_cards(connection.tenant) if is_up else []
        await connection.answer(200, msgspec.json.encode(running(cards)))

    async def ollama_show(self, connection: Connection) -> None:
        cards, resolver = self._model_cards(connection.tenant), self._resolver_for(connection)
        await self._answer(connection, self._show, lambda body: shown_model(body, cards, resolver))

    async def health(self, connection: Connection) -> None:
        await connection.answer(200, b'{"status":"ok"}')

    async def ready(self, connection: Connection) -> None:
        """Answer 200 while a node can take requests."""
        now = time.monotonic()
        roles = {node.role for node in self._registry.usable(now)}
        is_ready = not self._gateway.is_stopping and bool(roles)
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
            for node in self._registry
        ]
        return {"nodes": nodes, **self._registry.misfit_status(now)}

    def _may_see(self, connection: Connection) -> bool:
        try:
            self._check_seer(connection)
        except Unauthorized:
            return False
        return True

    def _check_seer(self, connection: Connection) -> None:
        given = keys_of(connection)
        tenant = self._tenants.find(given)
        is_seer = tenant is not None and tenant.sees_cluster
        is_operator = self._operators.asks_for_keys and self._operators.find(given) is not None
        if not is_seer and not is_operator:
            raise Unauthorized("send a key that may see the cluster's state, as Authorization: Bearer KEY")

    async def metrics(self, connection: Connection) -> None:
        self._check_seer(connection)
        await connection.answer(200, render(self._prometheus), [(b"content-type", CONTENT_TYPE.encode())])

    def _model_cards(self, tenant: Tenant) -> list[dict[str, object]]:
        own = [self._model_card(name) for name in self._resolver.names]
        names = self._resolver.for_tenant(tenant).adapters()
        return own + [self._model_card(name) | {"parent": self._resolver.model_name} for name in names]

    def _model_card(self, name: str) -> dict[str, object]:
        weights = self._registry.weights()
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "max_model_len": self.max_context(),
            "context_length": self.max_context(),
            "sampling_defaults": asdict(self._resolver.defaults),
            "weights": weights and msgspec.structs.asdict(weights),
        }


def with_certificate(body: Any, path: str) -> Any:
    """Return the body as if its field `certificate` asked for what the header asks for."""
    if "certificate" not in body.__struct_fields__:
        where = "/v1/chat/completions and /v1/completions"
        raise InvalidRequest(f"the header X-Certificate has no meaning at {path}: {where} answer with certificates")
    return msgspec.structs.replace(body, certificate=True)
