"""Ask a server, and read its stream as far as wanted, or to its end over broken connections."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from stream_conformance.sse import Event, Progress, Splitter

PAUSE_S = 0.25
BROKEN = (http.client.HTTPException, OSError)


def may_ask_again(status: int) -> bool:
    return status in (408, 425, 429) or 500 <= status < 600


@dataclass(slots=True)
class Reading:
    """One answer. `status`: 0 where the server can't be reached. `text`: a body that is not a stream."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    text: str = ""

    @property
    def marked(self) -> list[Event]:
        """The events with data, without pings and errors."""
        return [event for event in self.events if event.data and event.name != "ping" and not event.is_error]

    @property
    def errors(self) -> str:
        return " ".join(event.data for event in self.events if event.is_error)

    @property
    def is_whole(self) -> bool:
        return any(event.is_end for event in self.events)


class Asker:
    """Sends requests of one API. `urls`: servers that should continue each other's streams."""

    def __init__(self, urls: list[str], path: str, key: str, timeout_s: float) -> None:
        self.urls, self._path, self._timeout_s = urls, path, timeout_s
        self._key = {"Authorization": f"Bearer {key}", "x-api-key": key} if key else {}

    def ask(
        self,
        body: Mapping[str, Any] | bytes,
        headers: Mapping[str, str],
        *,
        until: Callable[[list[Event]], bool] = lambda _: False,
        url: str = "",
        with_key: bool = True,
    ) -> Reading:
        """Read an answer until it ends or breaks, or until `until` is true of the events so far: then hang up.

        A server that can't be reached has the status 0.
        """
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        parts = urlsplit(url or self.urls[0])
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._timeout_s)
        own = self._key if with_key else {}
        reading = Reading()
        try:
            path = parts.path.rstrip("/") + self._path
            connection.request("POST", path, raw, {"Content-Type": "application/json", **own, **headers})
            answer = connection.getresponse()
            reading.status, reading.headers = answer.status, {k.lower(): v for k, v in answer.getheaders()}
            if "text/event-stream" not in reading.headers.get("content-type", ""):
                reading.text = answer.read().decode(errors="replace")
                return reading
            splitter = Splitter()
            while data := answer.read1(65536):
                for event in splitter.feed(data):
                    reading.events.append(event)
                    if until(reading.events):
                        return reading
        except BROKEN:
            pass
        finally:
            connection.close()
        return reading

    def read_to_end(
        self,
        body: Mapping[str, Any],
        patience_s: float,
        meanwhile: Callable[[list[Event]], None],
        progress: Progress | None = None,
    ) -> tuple[list[Event], int]:
        """Read a stream over all its broken connections; return its events with ids and how often it broke.

        `progress`: where to continue; None: at the beginning. `meanwhile` is called with the events so far. Raise
        ContractBroken for a gap, TimeoutError after `patience_s` without an event, and PermissionError if the server
        refuses to go on.
        """
        progress = progress or Progress()
        events, num_broken = list[Event](), -1
        since = time.monotonic()

        def until(new: list[Event]) -> bool:
            nonlocal since
            taken = progress.take(new[-1].raw)
            if taken:
                events.extend(event for event in taken if event.id)
                since = time.monotonic()
            meanwhile(events)
            return progress.asks_again

        while not progress.has_ended:
            num_broken += 1
            if num_broken:
                time.sleep(PAUSE_S)
            if time.monotonic() - since > patience_s:
                raise TimeoutError(f"no event within {patience_s:.0f} s")
            progress.begin()
            url = self.urls[num_broken % len(self.urls)]
            reading = self.ask(body, progress.headers, until=until, url=url)
            if reading.status not in (0, 200) and not may_ask_again(reading.status):
                raise PermissionError(f"status {reading.status}: {reading.text[:200]}")
        return events, num_broken
