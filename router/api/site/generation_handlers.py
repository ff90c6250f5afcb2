"""The handlers of paths that generate: from a body to its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from router.api.answer.answer_span import AnswerSpan, BodyTimes, begin_answer, refusals_traced
from router.api.answer.generation_plan import GenerationPlan
from router.api.answer.stream_start import StreamStart, begin_stream, digest_of_body
from router.api.answer.stream_token import Signer
from router.api.ask.generation_api import GenerationApi
from router.api.ask.structured import asks_for_grammar
from router.api.endpoint import Handler, keys_of, until_hang_up
from router.api.fields.parse import BodyParser
from router.api.openai.chat_task import tell_form
from router.api.site.body_reader import BodyReader
from router.api.site.generation import Generation
from router.api.site.served_model import ServedModel
from router.api.site.tables import APIS
from router.certify.signing import FLAG as CERTIFICATE_FLAG
from router.certify.signing import AnswerSigner
from router.dispatch.gateway import Gateway
from router.http.body_budget import BodyHold
from router.http.check_thread import CheckThread
from router.http.connection import Connection
from router.http.kept_answers import REPLAYED, KeptAnswers, name_of_request
from router.queue.desk import Desk
from shared.core.errors import BatonError, InvalidRequest
from shared.observe.tracer import Tracer

CERTIFICATE = b"x-certificate"
STREAM_IDS = b"x-stream-ids"  # event ids are opt-in, because many clients expect one data line per event
NO_CERTIFICATES = (
    f"this server signs no certificates: its operator must start the router with {CERTIFICATE_FLAG} FILE, which `baton "
    "keys certificate FILE` makes"
)


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


class GenerationHandlers:
    def __init__(
        self,
        model: ServedModel,
        bodies: BodyReader,
        gateway: Gateway,
        desk: Desk,
        signer: Signer,
        answers: AnswerSigner | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`answers` signs certificates; None if the router has no key for them."""
        self._model, self._bodies, self._gateway, self._desk = model, bodies, gateway, desk
        self._signer, self._answers, self._tracer = signer, answers, tracer
        self._kept = KeptAnswers(time.monotonic)
        self._checks = CheckThread()

    def by_path(self) -> dict[str, Handler]:
        return {api.table.path: partial(self._generate, api, self._bodies.parser(api.table)) for api in APIS}

    async def _generate(self, api: GenerationApi[Any], parser: BodyParser[Any], connection: Connection) -> None:
        arrived, path = time.monotonic(), api.table.path
        with refusals_traced(self._tracer, path, arrived, connection):
            raw = await self._bodies.raw(connection)
        asked = Asked(api, raw, connection.body.hold, BodyTimes(arrived, time.monotonic()))
        del raw

        def parse() -> None:
            asked.body = self._bodies.parse(parser, asked.raw, connection, api.skipped)
            if connection.header(CERTIFICATE) is not None:
                asked.body = with_certificate(asked.body, api.table.path)
            connection.name(asked.body.request_id)

        async def work() -> None:
            key = connection.header(b"idempotency-key")
            await self._bodies.work.turn()
            with refusals_traced(self._tracer, path, arrived, connection):
                if key is None:  # a kept answer needs no room
                    with self._desk.refusals(connection.tenant):
                        self._gateway.check_room(connection.tenant)
                await self._bodies.work.in_time(asked.raw, parse, asked.hold)
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
            tell_form(self._bodies.once, headers)
            bill = self._desk.charge(connection.tenant, plan.cost, headers.update)
        with bill:
            generation = Generation(
                plan,
                partial(api.writer, body),
                self._model.resolver.text.tokenizer,
                self._gateway,
                self._bodies.metrics,
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
        contexts = self._model.contexts()
        last_event_id, has_ids = connection.header(b"last-event-id"), connection.header(STREAM_IDS) is not None
        is_resumable = api.table.has_event_ids and (has_ids or last_event_id is not None)

        resolver = self._model.resolver_for(connection.tenant)

        def plan() -> tuple[GenerationPlan, StreamStart | None]:
            made = api.plan(body, resolver, contexts)
            if made.is_certified and self._answers is None:
                raise InvalidRequest(NO_CERTIFICATES, param="certificate")
            if not made.show.stream or not is_resumable:
                return made, None
            return begin_stream(api.table.path, body, made, self._signer, last_event_id)

        if asks_for_grammar(body):
            return await self._checks.run(plan, asked.hold)
        return await self._bodies.work.in_time(asked.raw, plan, asked.hold)

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
            digest = await self._bodies.work.in_time(asked.raw, partial(digest_of_body, path, body), asked.hold)
            answer, is_again = self._kept.answer(name, digest, lambda: self._make(asked.moved(), connection))
        del body  # a repeated request waits without its body
        asked.drop()
        data = await answer
        if is_again:
            connection.more_headers[REPLAYED] = b"true"
            self._bodies.metrics.replayed()
        await connection.answer(200, data)

    async def _make(self, asked: Asked, connection: Connection) -> bytes:
        connection.was_admitted = True  # this method counts refusals, not the endpoint
        unsent = connection.unsent()
        try:
            await self._run(asked, unsent)
        except BatonError as error:
            if not unsent.was_admitted:
                self._bodies.metrics.refused(error.code)
            raise
        finally:
            asked.drop()
        return unsent.data


def with_certificate(body: Any, path: str) -> Any:
    """Return the body as if its field `certificate` asked for what the header asks for."""
    if "certificate" not in body.__struct_fields__:
        where = "/v1/chat/completions and /v1/completions"
        raise InvalidRequest(f"the header X-Certificate has no meaning at {path}: {where} answer with certificates")
    return msgspec.structs.replace(body, certificate=True)
