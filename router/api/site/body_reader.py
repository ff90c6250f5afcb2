"""Read the JSON bodies of requests, without keeping the router's loop from its other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from router.api.fields.fields import B, FieldTable
from router.api.fields.json_shape import check_shape
from router.api.fields.parse import BodyParser
from router.api.openai.chat_task import tell_form
from router.api.site.tables import KNOWN_FIELDS
from router.http.connection import Connection
from router.http.ignored import IGNORED, names_in_header
from router.http.work_threads import BodyWork
from shared.observe.log_once import LogOnce
from shared.observe.metrics import RequestMetrics


@dataclass(frozen=True, slots=True)
class BodyReader:
    """`once` logs each kind of event once."""

    metrics: RequestMetrics
    once: LogOnce
    max_bytes: int
    strict_fields: bool = False
    max_json_depth: int = 128
    work: BodyWork = field(default_factory=BodyWork)

    def parser(self, table: FieldTable[B]) -> BodyParser[B]:
        return BodyParser(table, strict=self.strict_fields)

    async def raw(self, connection: Connection) -> bytes:
        return await connection.body.read(self.max_bytes)

    def parse(
        self, parser: BodyParser[B], raw: bytes, connection: Connection, skipped: Callable[[B], Sequence[str]]
    ) -> B:
        check_shape(raw, self.max_json_depth)
        parsed = parser.parse(raw)
        ignored = (*parsed.ignored, *skipped(parsed.body))
        if ignored:
            connection.more_headers[IGNORED] = names_in_header(ignored)
            for name in ignored:
                self.metrics.ignored_field(name if name in KNOWN_FIELDS else "other")
        return parsed.body

    async def answer(
        self,
        connection: Connection,
        parser: BodyParser[B],
        make: Callable[[B], object],
        skipped: Callable[[B], Sequence[str]] = lambda body: (),
    ) -> None:
        """Answer with what `make` returns, as JSON."""
        raw = await self.raw(connection)

        def work() -> bytes:
            return msgspec.json.encode(make(self.parse(parser, raw, connection, skipped)))

        await self.work.turn()
        data = await self.work.in_time(raw, work, connection.body.hold)
        tell_form(self.once, connection.more_headers)
        await connection.answer(200, data)
