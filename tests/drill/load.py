"""Streams at one router, one after another in each of a few slots, and what their clients saw. Every answer is compared
with HashLM's reference: what happens to the hosts meanwhile must not show, but as a pause."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from tests.drill.hosts import Host
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.mixed_clients import Client, make_client, stream

PROMPTS = (0, 700, 0, 400, 1000, 0, 300, 500)  # lengths by kind of client; 0: some dozens
MAX_TOKENS = 300
SLOTS = 6
NO_NODES = '"code":"no_nodes"'
REST_S = 0.3  # between two requests of one slot


@dataclass(eq=False)
class Request:
    """One client, and the times at which it asked and at which its answer was over."""

    client: Client
    sent_at: float
    over_at: float = 0.0

    @property
    def is_flowing(self) -> bool:
        return self.over_at > 0 or self.client.num_tokens > 0

    @property
    def is_under_way(self) -> bool:
        return self.is_flowing and not self.over_at

    @property
    def longest_pause_s(self) -> float:
        """Without a token; the waits for the first one and for the end are pauses too."""
        times = [self.sent_at, *self.client.arrivals, *([self.over_at] if self.over_at else [])]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


class Clients(Protocol):
    """Who asks at a router next."""

    def client(self, router: str, slot: int) -> contextlib.AbstractContextManager[Client | None]:
        """The client is answered inside; None: nobody asks there for now."""


@dataclass(frozen=True, slots=True)
class Strangers:
    """Clients of every kind. `numbers` makes every prompt a new one: caches would hide hand-offs."""

    numbers: itertools.count[int]
    max_tokens: int = MAX_TOKENS

    @contextlib.contextmanager
    def client(self, router: str, slot: int) -> Iterator[Client]:
        yield make_client(next(self.numbers), self.max_tokens, PROMPTS[slot % len(PROMPTS)])


@dataclass(eq=False)
class Load:
    """Runs on `host` from `begin` to `end`."""

    host: Host
    url: str
    clients: Clients
    num_slots: int = SLOTS
    requests: list[Request] = field(default_factory=list)
    refusals: int = 0  # 503: no node at all, try again; and so it is done
    _stops: threading.Event = field(default_factory=threading.Event)
    _running: Future[None] | None = None

    def begin(self) -> None:
        self._running = self.host.begin(asyncio.run, self._all_slots())

    def meet_tokens(self) -> None:
        """Return when every slot has tokens."""
        self._until(lambda: len(self.requests) >= self.num_slots and self.is_flowing, "all slots stream")

    @property
    def is_flowing(self) -> bool:
        return all(request.is_flowing for request in self.requests)

    def go_round(self, times: int = 2) -> None:
        """Return when so many requests per slot, sent from now on, are over."""
        first, last = len(self.requests), len(self.requests) + times * self.num_slots
        self._until(lambda: len(self.requests) >= last and all(r.over_at for r in self.requests[first:last]), "answers")

    def meet_streams(self) -> None:
        """Return when half of the slots have answers under way."""
        self._until(
            lambda: 2 * sum(r.is_under_way for r in self.requests) >= self.num_slots, "half of the slots stream"
        )

    @property
    def longest_pause_s(self) -> float:
        return max(request.longest_pause_s for request in self.requests)

    def ask_no_more(self) -> None:
        """Requests under way go on."""
        self._stops.set()

    def end(self) -> None:
        """Return when every answer is over. Raise what went wrong in a client."""
        self.ask_no_more()
        if self._running is not None:
            self._running.result()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():
            assert self._running is not None
            if self._running.done():
                self._running.result()
            assert time.monotonic() < deadline, f"never: {what}"
            time.sleep(0.02)

    async def _all_slots(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=HANG_GUARD_S, limits=limits) as http, asyncio.TaskGroup() as tasks:
            for slot in range(self.num_slots):
                tasks.create_task(self._slot(http, slot))

    async def _slot(self, http: httpx.AsyncClient, slot: int) -> None:
        while not self._stops.is_set():
            with self.clients.client(self.host.name, slot) as client:
                if client is not None:
                    await self._ask(http, client)
            await asyncio.sleep(REST_S)

    async def _ask(self, http: httpx.AsyncClient, client: Client) -> None:
        request = Request(client, time.monotonic())
        self.requests.append(request)
        try:
            await stream(http, self.url, client)
            while NO_NODES in client.error and not client.num_tokens:
                self.refusals += 1
                client.error = ""
                await asyncio.sleep(REST_S)
                await stream(http, self.url, client)
        except httpx.HTTPError as error:  # the router itself is gone
            client.error = f"{type(error).__name__}: {error}"
        finally:
            request.over_at = time.monotonic()
