"""Server-sent events: bytes in, whole events out, and how much of a stream a reader has. Without input or output."""

from __future__ import annotations

import json
from dataclasses import dataclass

# Names of last events. The last data of chats and completions is [DONE].
ENDS = {"message_stop", "response.completed", "response.incomplete"}
# Errors after which asking again is of no use.
FINAL = ("invalid_request_error", "invalid_prompt", "resume_mismatch", "unknown_stream")


class ContractBroken(Exception):
    """By its id an event is missing or came twice, or it has no id behind others that have one."""


@dataclass(frozen=True, slots=True)
class Event:
    """`raw`: the event's bytes with its blank line. `id`, `name`, `data`: "" where it has none."""

    raw: bytes
    id: str = ""
    name: str = ""
    data: str = ""

    @property
    def is_end(self) -> bool:
        return self.data == "[DONE]" or self.name in ENDS

    @property
    def is_error(self) -> bool:
        """Whether it says that the stream failed. Such an event has no id."""
        if self.id or not self.data.startswith("{"):
            return False
        if self.name in ("error", "response.failed"):
            return True
        try:
            return bool(json.loads(self.data).get("error"))
        except ValueError:
            return False

    @property
    def position(self) -> str:
        return self.id.rpartition("/")[2]

    @property
    def number(self) -> int:
        """The event's number in its stream; 0 where its id begins with none."""
        first = self.position.partition(".")[0]
        return int(first) if first.isdecimal() else 0


class Splitter:
    """Cuts bytes into events. An unfinished event is never shown."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            self._lines.append(line + b"\n")
            if not line.rstrip(b"\r"):
                found.append(event_of(self._lines))
                self._lines = []
        return found


def event_of(lines: list[bytes]) -> Event:
    fields: dict[str, list[str]] = {"id": [], "event": [], "data": []}
    for line in lines:
        name, _, value = line.rstrip(b"\r\n").decode(errors="replace").partition(":")
        if name in fields:
            fields[name].append(value.removeprefix(" "))
    last = {name: values[-1] if values else "" for name, values in fields.items()}
    return Event(b"".join(lines), last["id"], last["event"], "\n".join(fields["data"]))


class Progress:
    """What a reader has of one stream, over all its connections.

    `token`, `position`: what the next request continues from. `has_ended`: the last event, or an error after which
    asking again is of no use, has come. `asks_again`: an error came after which the reader should ask again.
    """

    def __init__(self) -> None:
        self.token = self.position = ""
        self.has_ended = self.asks_again = False
        self.number = 0
        self._num_unmarked = 0
        self._splitter = Splitter()

    def begin(self) -> None:
        """A new connection: an event of which the old one brought a part comes again."""
        self._splitter, self.asks_again = Splitter(), False

    @property
    def can_resume(self) -> bool:
        """Whether asking again repeats nothing: the events have ids, or none has come."""
        return not self.has_ended and (bool(self.position) or not self._num_unmarked)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the next request."""
        return {"Last-Event-ID": f"{self.token}/{self.position}"} if self.position else {"X-Stream-Ids": "1"}

    def take(self, data: bytes) -> list[Event]:
        """Return the whole events in `data` that the reader lacks.

        Raise ContractBroken for a gap, a repetition, or an event behind ids that has none: a server that knows no ids
        would begin the answer anew.
        """
        taken = []
        for event in self._splitter.feed(data):
            is_error = event.is_error
            if is_error and self.can_resume and not any(word in event.data for word in FINAL):
                self.asks_again = True
                break
            if event.id:
                self._advance(event)
            elif event.data and event.name != "ping" and not is_error:
                if self.position:
                    raise ContractBroken(f"an event without an id came after event number {self.number}")
                self._num_unmarked += 1
            self.has_ended |= event.is_end or is_error
            taken.append(event)
        return taken

    def _advance(self, event: Event) -> None:
        if event.number != self.number + 1:
            raise ContractBroken(f"event {event.id!r} came after event number {self.number}")
        token, slash, self.position = event.id.rpartition("/")
        self.token, self.number = token if slash else self.token, event.number
