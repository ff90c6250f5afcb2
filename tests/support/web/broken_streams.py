"""Servers that break the contract for streams, each in one way, and what starts them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from stream_conformance.reference import Json, Reference, Refused, events_of, short
from tests.support.machine.patience import HANG_GUARD_S

MANY = 100  # events: more than a whole stream has of which the rules ask for the rest


@contextlib.contextmanager
def serving(*servers: Reference) -> Iterator[list[str]]:
    """Give the servers' URLs. They run in one thread of their own."""
    loop = asyncio.new_event_loop()

    async def begin() -> list[asyncio.Server]:
        return [await asyncio.start_server(server.serve, "127.0.0.1", 0) for server in servers]

    listeners = loop.run_until_complete(begin())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def end() -> None:
        for listener in listeners:
            listener.close()
        open_ones = asyncio.all_tasks() - {asyncio.current_task()}
        for task in open_ones:
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports let go of their sockets in the loop's next round

    try:
        yield [f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}" for listener in listeners]
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(HANG_GUARD_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(HANG_GUARD_S)
        loop.close()


class WithoutAnId(Reference):
    def mark(self, position: str, token: str, is_first: bool) -> str:
        return "" if position.startswith("3.") else super().mark(position, token, is_first)


class IdsOfOtherLetters(Reference):
    def mark(self, position: str, token: str, is_first: bool) -> str:
        return super().mark(position + "\u00e9" * position.startswith("3."), token, is_first)


class IdsForAll(Reference):
    def wants_ids(self, headers: dict[str, str]) -> bool:
        return True


class Repeats(Reference):
    def place(self, position: str, marks: list[str]) -> int:
        found = super().place(position, marks)
        return found if found == len(marks) else found - 1


class Skips(Reference):
    def place(self, position: str, marks: list[str]) -> int:
        return min(super().place(position, marks) + 1, len(marks))


class TokenOnlyOnce(Reference):
    """A continuation's first id has no token."""

    def mark(self, position: str, token: str, is_first: bool) -> str:
        return super().mark(position, token, is_first and position.startswith("1."))


class CountsByTwo(Reference):
    def mark(self, position: str, token: str, is_first: bool) -> str:
        number, _, more = position.partition(".")
        return super().mark(f"{2 * int(number)}.{more}", token, is_first)

    def place(self, position: str, marks: list[str]) -> int:
        number, _, more = position.partition(".")
        return super().place(f"{int(number) // 2}.{more}", marks)


class Changed(Reference):
    """Answers differ in a continuation: `changed` says how."""

    is_continued = False

    def begin(self, body: Json, digest: str) -> str:
        self.is_continued = False
        return super().begin(body, digest)

    def resume(self, given: str, digest: str) -> tuple[str, str]:
        self.is_continued = True
        return super().resume(given, digest)

    def events(self, path: str, body: Json, facts: list[Any]) -> list[str]:
        events = events_of(path, body, facts)
        return self.changed(path, body, facts, events) if self.is_continued else events

    def changed(self, path: str, body: Json, facts: list[Any], events: list[str]) -> list[str]:
        return events


class DrawsAnew(Changed):
    """If the client gave no seed, a continuation has another one."""

    def changed(self, path: str, body: Json, facts: list[Any], events: list[str]) -> list[str]:
        return events if "seed" in body else events_of(path, body, [facts[0], facts[1] + 1, *facts[2:]])


class RenamesAnswers(Changed):
    def changed(self, path: str, body: Json, facts: list[Any], events: list[str]) -> list[str]:
        return [event.replace('"id": "chatcmpl-', '"id": "chatcmpl-again-') for event in events]


class CountsTheRest(Changed):
    """A continuation's usage has fewer tokens."""

    def changed(self, path: str, body: Json, facts: list[Any], events: list[str]) -> list[str]:
        return [event.replace('"completion_tokens": ', '"completion_tokens": 1') for event in events]


class EndsOtherwise(Changed):
    def changed(self, path: str, body: Json, facts: list[Any], events: list[str]) -> list[str]:
        return [event.replace('"length"', '"stop"') for event in events]


class ForgetsBroken(Reference):
    """Forgets a stream with its connection. Only streams that the rules break have as many events."""

    def place(self, position: str, marks: list[str]) -> int:
        if len(marks) > MANY:
            raise Refused(400, "unknown_stream")
        return super().place(position, marks)


class OneConnection(Reference):
    """A stream does not continue while its connection is open, which the client closes."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: dict[asyncio.StreamWriter, asyncio.StreamReader] = {}
        self.open: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.readers[writer] = reader
        await super().serve(reader, writer)

    async def stream(self, path: str, raw: bytes, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        digest = self.digest(path, raw)
        if digest in self.open:
            raise Refused(409, "still open")
        self.open.append(digest)
        try:
            await super().stream(path, raw, headers, writer)
            await self.readers[writer].read()
        finally:
            self.open.remove(digest)


class ContinuesOnce(Reference):
    """Of a long stream, places beyond the one where it was continued first are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.first_places: dict[str, int] = {}

    def place(self, position: str, marks: list[str]) -> int:
        found = super().place(position, marks)
        if found > self.first_places.setdefault(marks[0], found) and len(marks) > MANY:
            raise Refused(422, "resume_mismatch")
        return found


class ServesOnce(Reference):
    """Each place of each stream is served once."""

    def __init__(self) -> None:
        super().__init__()
        self.served: set[str] = set()

    def resume(self, given: str, digest: str) -> tuple[str, str]:
        found = super().resume(given, digest)
        if given in self.served:
            raise Refused(400, "unknown_stream")
        self.served.add(given)
        return found


class EndsAgain(Reference):
    def place(self, position: str, marks: list[str]) -> int:
        return min(super().place(position, marks), len(marks) - 1)


class ComparesBytes(Reference):
    def digest(self, path: str, raw: bytes) -> str:
        return short([path, raw.decode()])


class TakesAnyBody(Reference):
    """It continues what the token says, whatever is asked for."""

    def resume(self, given: str, digest: str) -> tuple[str, str]:
        token, _, position = given.rpartition("/")
        return token, position if self.facts(token) else ""


class AsksForAgain(Reference):
    """Another body is refused as if it might be taken later."""

    def resume(self, given: str, digest: str) -> tuple[str, str]:
        try:
            return super().resume(given, digest)
        except Refused as error:
            raise Refused(503 if error.args[0] == 422 else 400, error.args[1]) from None


class RefusesOtherwise(Reference):
    """Another body is refused for good, with another status than the contract's."""

    def resume(self, given: str, digest: str) -> tuple[str, str]:
        try:
            return super().resume(given, digest)
        except Refused as error:
            raise Refused(404 if error.args[0] == 422 else 400, error.args[1]) from None


class LimitsAnswers(Reference):
    """Longer answers are refused."""

    def begin(self, body: Json, digest: str) -> str:
        if int(body["max_tokens"]) > MANY:
            raise Refused(400, "too many tokens")
        return super().begin(body, digest)


class WritesNoJson(Reference):
    @staticmethod
    def events(path: str, body: Json, facts: list[Any]) -> list[str]:
        return [event.replace("}\n\n", "\n\n") for event in events_of(path, body, facts)]


class BeginsAnew(Reference):
    """An id without our signature is taken for none. `has_slash`: of which kind the id must be."""

    def __init__(self, *, has_slash: bool) -> None:
        super().__init__()
        self.has_slash = has_slash

    def resume(self, given: str, digest: str) -> tuple[str, str]:
        try:
            return super().resume(given, digest)
        except Refused as error:
            if error.args[0] != 400 or ("/" in given) is not self.has_slash:
                raise
            return self.begin({}, digest), ""

    def place(self, position: str, marks: list[str]) -> int:
        return super().place(position, marks) if position else 0


class TakesAnyPlace(Reference):
    def place(self, position: str, marks: list[str]) -> int:
        return super().place(position, marks) if position in marks else 3


class NeedsNoKey(Reference):
    """Who continues a stream needs no key."""

    def may(self, headers: dict[str, str]) -> bool:
        return "last-event-id" in headers or super().may(headers)


class KeepsOthers(Reference):
    """A repeated request gets a new answer that is said to be the kept one."""

    def whole(self, path: str, raw: bytes, headers: dict[str, str]) -> tuple[bytes, str]:
        answer, more = super().whole(path, raw, headers)
        return (answer.replace(b'"id": "', b'"id": "x') if more else answer), more


class KeysForAllBodies(Reference):
    """A kept answer is given for another body, too."""

    def whole(self, path: str, raw: bytes, headers: dict[str, str]) -> tuple[bytes, str]:
        return super().whole(path, b"{}", headers)


class KeepsSilently(Reference):
    """A kept answer is not said to be one."""

    def whole(self, path: str, raw: bytes, headers: dict[str, str]) -> tuple[bytes, str]:
        return super().whole(path, raw, headers)[0], ""
