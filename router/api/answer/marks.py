"""Write the ids of a stream's events, and continue from such an id. Pure.

    id: TOKEN/7.0.12-0123456789abcdef,9-fedcba9876543210e       the first event of a connection
    id: 8.0.13-89abcdef01234567,9-fedcba9876543210e             the next event
        | | |  |                                 '-- this choice has ended
        | | |  '-- digest of the choice's token ids so far
        | | '-- tokens of the choice so far
        | '-- events since the last new token: one token may make several events
        '-- events so far

Token ids determine the text. So an event's id does too, however the tokens were batched.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from router.api.answer.choice_text import Delta
from router.http.errors import ResumeMismatch, UnknownStream

DIGEST_BYTES = 8
MAX_CHOICES = 32  # an id lists all choices; a stream with more has no ids
END_OF_EVENT = b"\n\n"
ID_WORD = re.compile(r"([A-Za-z0-9_-]{1,200})/(\d{1,9})\.(\d{1,6})\.([0-9a-f,e-]{1,2048})", re.ASCII)
CHOICE_WORD = re.compile(r"(\d{1,9})-([0-9a-f]{16})(e?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class StreamPlace:
    num_tokens: int
    digest: str
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Position:
    """`num_more`: events since a choice last got a token or ended."""

    num_events: int
    num_more: int
    choices: tuple[StreamPlace, ...]


def read_id(header: str) -> tuple[str, Position]:
    """Return the token and position in a Last-Event-ID. Raise UnknownStream for a malformed id."""
    found = ID_WORD.fullmatch(header.strip())
    choices = [CHOICE_WORD.fullmatch(word) for word in found[4].split(",")] if found else []
    places = [StreamPlace(int(one[1]), one[2], bool(one[3])) for one in choices if one]
    if found is None or len(places) < len(choices):
        raise UnknownStream("Last-Event-ID must be the token of the stream's first id, a slash, and the last id")
    return found[1], Position(int(found[2]), int(found[3]), tuple(places))


class Marks:
    """Writes one stream's ids. The first id contains `token`."""

    def __init__(self, num_choices: int, token: str) -> None:
        self.num_events = 0
        self.num_recomputed = 0
        self._num_more = 0
        self._prefix = f"{token}/"
        self._hashes = [blake2b(digest_size=DIGEST_BYTES) for _ in range(num_choices)]
        self._counts = [0] * num_choices
        self._ended = [False] * num_choices
        self._words = [self._word(index) for index in range(num_choices)]

    def stamp(self, data: bytes, index: int = 0, delta: Delta | None = None) -> bytes:
        """Add ids to events. `delta`: what these events add to choice `index`. Only the last id includes this delta."""
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
        """Whether the reader has seen more than was recomputed so far."""
        return False

    def holds(self, index: int) -> bool:
        """Whether this choice must wait until other choices catch up."""
        return False

    def finish(self) -> None:
        """Raise ResumeMismatch if the reader saw more tokens than the answer has."""

    def _mark(self, event: bytes) -> bytes:
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
    """Shows nothing until every choice of a resumed stream has reached the reader's position.

    Until then each delta has one token, and the owner holds back choices for which `holds` is true.
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
        """Show only events that the reader lacks. Raise ResumeMismatch if the reader saw other tokens."""
        if not self._behind:
            return super().stamp(data, index, delta)
        if delta is not None:
            self._advance(index, delta)
            self._look_at(index)
            self._begin_if_met()
        return b""

    def finish(self) -> None:
        if self._behind:
            raise ResumeMismatch("the answer ended before the point that the client had received")

    def _look_at(self, index: int) -> None:
        seen = self._seen.choices[index]
        if self._counts[index] > seen.num_tokens or (self._ended[index] and not seen.has_ended):
            raise ResumeMismatch(f"choice {index} ended at another token than in the answer that the client saw")
        if self._counts[index] == seen.num_tokens and self._ended[index] == seen.has_ended:
            if self._hashes[index].hexdigest() != seen.digest:
                raise ResumeMismatch(f"choice {index} has other tokens than the client saw")
            self._behind.discard(index)

    def _begin_if_met(self) -> None:
        """Once no choice is behind, set the number of events to the reader's at its last new token."""
        if not self._behind:
            self.num_events, self._num_more = self._seen.num_events - self._seen.num_more, 0

    def _with_id(self, event: bytes) -> bytes:
        if self._skip:
            self._skip -= 1
            return b""
        return super()._with_id(event)


def packed(ids: Sequence[int]) -> bytes:
    """Return ids as bytes, the same on every machine."""
    return array("I", ids).tobytes()
