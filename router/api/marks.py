"""The ids of a stream's events: where its reader stands. Pure.

    id: TOKEN/7.0.12-0123456789abcdef,9-fedcba9876543210e       the first event of a connection
    id: 8.0.13-89abcdef01234567,9-fedcba9876543210e             the next one
        | | |  |                                 '-- this choice has ended
        | | |  '-- digest of the choice's ids so far
        | | '-- tokens of the choice so far
        | '-- events behind that point: one token may show as several
        '-- events so far

Text is a function of the ids before it, so that an id says what has been shown, however the tokens were batched.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from router.api.choice_text import Delta
from router.api.errors import ResumeMismatch, UnknownStream

DIGEST_BYTES = 8
MAX_CHOICES = 32  # streams of more have no ids: every event would hold all of their places
END_OF_EVENT = b"\n\n"
ID_WORD = re.compile(r"([A-Za-z0-9_-]{1,200})/(\d{1,9})\.(\d{1,6})\.([0-9a-f,e-]{1,2048})", re.ASCII)
CHOICE_WORD = re.compile(r"(\d{1,9})-([0-9a-f]{16})(e?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """How far one choice has come."""

    num_tokens: int
    digest: str
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a stream, as its event's id tells it: `num_events` events were sent, and each choice came as far as
    `choices` says. `num_more` of these events came after the last one that moved a choice."""

    num_events: int
    num_more: int
    choices: tuple[Place, ...]


def read_id(header: str) -> tuple[str, Position]:
    """Return token and position of a Last-Event-ID. Raise UnknownStream for what is none of ours."""
    found = ID_WORD.fullmatch(header.strip())
    choices = [CHOICE_WORD.fullmatch(word) for word in found[4].split(",")] if found else []
    places = [Place(int(one[1]), one[2], bool(one[3])) for one in choices if one]
    if found is None or len(places) < len(choices):
        raise UnknownStream("Last-Event-ID must be the token of the stream's first id, a slash, and the last id")
    return found[1], Position(int(found[2]), int(found[3]), tuple(places))


class Marks:
    """Writes the ids of one stream. `token`: stands in the first id of this connection."""

    def __init__(self, num_choices: int, token: str) -> None:
        self.num_events = 0
        self.num_recomputed = 0  # tokens that the reader has already
        self._num_more = 0
        self._prefix = f"{token}/"
        self._hashes = [blake2b(digest_size=DIGEST_BYTES) for _ in range(num_choices)]
        self._counts = [0] * num_choices
        self._ended = [False] * num_choices
        self._words = [self._word(index) for index in range(num_choices)]

    def stamp(self, data: bytes, index: int = 0, delta: Delta | None = None) -> bytes:
        """Return events with their ids. `delta`: what they show, of one choice; only the last one's id counts it."""
        events = data.split(END_OF_EVENT)[:-1]
        stamped = [self._mark(event) for event in (events[:-1] if delta is not None else events)]
        if delta is not None:
            self._advance(index, delta)
            if events:
                self.num_events += 1
                stamped.append(self._with_id(events[-1]))
        return b"".join(stamped)

    @property
    def is_behind(self) -> bool:
        """Whether the reader has seen more."""
        return False

    def holds(self, index: int) -> bool:
        """Whether what this choice says has to wait for others."""
        return False

    def finish(self) -> None:
        """The stream is at its end."""

    def _mark(self, event: bytes) -> bytes:
        """One that brings the reader to no new place."""
        self._num_more += 1
        self.num_events += 1
        return self._with_id(event)

    def _with_id(self, event: bytes) -> bytes:
        prefix, self._prefix = self._prefix, ""
        own = f"{prefix}{self.num_events}.{self._num_more}.{','.join(self._words)}"
        return b"id: %b\n%b%b" % (own.encode(), event, END_OF_EVENT)

    def _advance(self, index: int, delta: Delta) -> None:
        if delta.ids:
            self._hashes[index].update(packed(delta.ids))
            self._counts[index] += len(delta.ids)
        elif delta.finish_reason is None:
            return
        self._num_more = 0
        self._ended[index] = self._ended[index] or delta.finish_reason is not None
        self._words[index] = self._word(index)

    def _word(self, index: int) -> str:
        return f"{self._counts[index]}-{self._hashes[index].hexdigest()}{'e' if self._ended[index] else ''}"


class ResumedMarks(Marks):
    """Of a stream that goes on: says nothing until every choice is where its reader saw it last.

    Deltas come token by token until then. What a choice that is there says meanwhile is its owner's to hold back.
    """

    def __init__(self, seen: Position, token: str) -> None:
        super().__init__(len(seen.choices), token)
        self._seen = seen
        self._skip = seen.num_more
        self._behind = set(range(len(seen.choices)))
        self.num_recomputed = sum(place.num_tokens for place in seen.choices)
        for index in range(len(seen.choices)):
            self._look_at(index)
        self._begin_if_met()

    @property
    def is_behind(self) -> bool:
        return bool(self._behind)

    def holds(self, index: int) -> bool:
        return bool(self._behind) and index not in self._behind

    def stamp(self, data: bytes, index: int = 0, delta: Delta | None = None) -> bytes:
        """Return what the reader has not seen. Raise ResumeMismatch where it saw something else."""
        if not self._behind:
            return super().stamp(data, index, delta)
        if delta is not None:
            self._advance(index, delta)
            self._look_at(index)
            self._begin_if_met()
        return b""

    def finish(self) -> None:
        if self._behind:
            raise ResumeMismatch("the answer ended before the place that the client saw")

    def _look_at(self, index: int) -> None:
        seen = self._seen.choices[index]
        if self._counts[index] > seen.num_tokens or (self._ended[index] and not seen.has_ended):
            raise ResumeMismatch(f"choice {index} ended elsewhere than what the client saw")
        if self._counts[index] == seen.num_tokens and self._ended[index] == seen.has_ended:
            if self._hashes[index].hexdigest() != seen.digest:
                raise ResumeMismatch(f"choice {index} has other tokens than the client saw")
            self._behind.discard(index)

    def _begin_if_met(self) -> None:
        """Once all are there, events are counted on from the reader's place."""
        if not self._behind:
            self.num_events, self._num_more = self._seen.num_events - self._seen.num_more, 0

    def _with_id(self, event: bytes) -> bytes:
        if self._skip:
            self._skip -= 1
            return b""
        return super()._with_id(event)


def packed(ids: Sequence[int]) -> bytes:
    """Return ids as bytes that are the same on every machine."""
    return array("I", ids).tobytes()
