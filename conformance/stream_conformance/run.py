"""What the rules ask of a server: whole streams, cut ones, and continuations, each with its comparison."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stream_conformance.apis import Api, contents, end_reasons
from stream_conformance.client import Asker, Reading
from stream_conformance.sse import Event, Progress

ASKED = {"X-Stream-Ids": "1"}
PROMPT = "Write the numbers from one to two hundred as words, one after another."
SEED = 7
REFUSALS = {"unknown_stream": 400, "resume_mismatch": 422, "idempotency_key_reused": 422}  # status by code


class Failed(Exception):
    """The server breaks the rule."""


class NotOffered(Exception):
    """The server does not promise this."""


class NotTested(Exception):
    """The rule needs something that was not given, or a rule that failed."""


@dataclass(slots=True)
class Options:
    """`hook`: a shell command that runs in the middle of a stream; "" for none. `patience_s`: for a stream to go on."""

    model: str = "default"
    prompt: str = PROMPT
    max_tokens: int = 24
    has_key: bool = False
    hook: str = ""
    patience_s: float = 60.0


@dataclass
class Run:
    asker: Asker
    api: Api
    options: Options
    idempotency_key: str = field(default_factory=lambda: secrets.token_hex(8))
    _places: int = 0

    def body(self, times: int = 1, *, is_drawn: bool = False, more: str = "") -> dict[str, Any]:
        """`times`: how often the answer's usual length. `is_drawn`: sampled, and the server draws the seed. `more`:
        goes behind the prompt."""
        prompt = self.options.prompt + more
        has_noise = is_drawn or self.api.has_seed
        body = self.api.body(self.options.model, prompt, self.options.max_tokens * times, 1.0 if has_noise else 0.0)
        return body | ({"seed": SEED} if self.api.has_seed and not is_drawn else {})

    @cached_property
    def basis(self) -> list[Event]:
        """The events of a whole stream. Raise ConnectionError if there is none, and NotOffered if they have no ids."""
        reading = self.asker.ask(self.body(), ASKED)
        if reading.status != 200 or not reading.marked:
            raise ConnectionError(f"no stream: status {reading.status} {reading.text[:200]}{reading.errors[:200]}")
        if "/" not in reading.marked[0].id:
            raise NotOffered("no TOKEN/POSITION in the first event's id")
        return reading.marked

    def place(self) -> int:
        """A number of events after which to continue: another one each time, as far as there are enough."""
        self._places += 1
        return 1 + (5 * self._places) % max(1, len(self.basis) - 1)

    def whole(self, body: Mapping[str, Any]) -> list[Event]:
        reading = self.asker.ask(body, ASKED)
        if not reading.is_whole:
            raise Failed(f"a stream did not end: status {reading.status} {reading.text[:100]}{reading.errors[:100]}")
        return reading.marked

    def cut(self, body: Mapping[str, Any], num_events: int, headers: Mapping[str, str] = ASKED) -> list[Event]:
        """Hang up after `num_events`. Raise Failed if none comes."""
        reading = self.asker.ask(body, headers, until=lambda events: len(Reading(events=events).marked) >= num_events)
        if not reading.marked:
            raise Failed(f"no stream: status {reading.status} {reading.text[:100]}{reading.errors[:100]}")
        return reading.marked

    def after(self, body: Mapping[str, Any] | bytes, seen: Sequence[Event], **more: Any) -> Reading:
        """Ask for the events after those."""
        return self.asker.ask(body, {"Last-Event-ID": last_event_id(seen)}, **more)

    def rest(self, body: Mapping[str, Any] | bytes, seen: Sequence[Event], **more: Any) -> list[Event]:
        """Return the events after those. Raise Failed if they don't come."""
        reading = self.after(body, seen, **more)
        if reading.status != 200 or not reading.is_whole:
            said = f"{reading.text[:100]}{reading.errors[:100]}"
            raise Failed(f"no continuation after event {len(seen)}: status {reading.status} {said}")
        return reading.marked

    def settled(self, body: Mapping[str, Any], first: Event) -> list[Event]:
        """Return the whole stream once more, from its first event on, over broken connections."""
        progress = Progress()
        progress.take(first.raw)
        return [first, *self.asker.read_to_end(body, self.options.patience_s, lambda _: None, progress)[0]]

    def text(self, events: Sequence[Event]) -> str:
        return "".join(self.api.text(data) for data in contents(events))

    def compare(self, wanted: Sequence[Event], got: Sequence[Event], where: str) -> None:
        """Raise Failed unless both have the same text, reasons to end, and one end."""
        texts = self.text(wanted), self.text(got)
        if texts[0] != texts[1]:
            at = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            raise Failed(f"{where}: the text differs at character {at}: {texts[0][at:][:20]!r}, {texts[1][at:][:20]!r}")
        if end_reasons(wanted) != end_reasons(got):
            raise Failed(f"{where}: it ended by {end_reasons(got)}, not by {end_reasons(wanted)}")
        if sum(event.is_end for event in got) != 1:
            raise Failed(f"{where}: {sum(event.is_end for event in got)} last events")

    def hook(self) -> None:
        done = subprocess.run(self.options.hook, shell=True, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotTested(f"the hook ended with {done.returncode}: {done.stderr.strip()[-100:]}")


def last_event_id(events: Sequence[Event]) -> str:
    """Return the newest token of the stream's ids, a slash, and the last position."""
    token = next(event.id.rpartition("/")[0] for event in reversed(events) if "/" in event.id)
    return f"{token}/{events[-1].position}"


def check_refused(reading: Reading, code: str) -> str:
    """Return the status. Raise Failed unless the server refuses for good, by status or by an event, with this code."""
    if reading.marked:
        raise Failed(f"the server sent {len(reading.marked)} events where it must refuse")
    if reading.status not in (200, REFUSALS[code]):
        raise Failed(f"status {reading.status}, not {REFUSALS[code]}")
    if code not in reading.text + reading.errors:
        raise Failed(f"status {reading.status} without the code {code}")
    return f"status {reading.status}"


def in_other_words(body: Mapping[str, Any]) -> bytes:
    """Return a body that is equal after parsing: other order, white space, escapes."""
    text = json.dumps(dict(reversed(list(body.items()))), indent=1)
    return text.replace('"stream"', '"\\u0073tream"').encode()
