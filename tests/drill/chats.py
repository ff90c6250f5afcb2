"""Chats of several turns at all routers in turn. Each prompt holds all that was said before, as chat clients send it.

A chat's next turn goes to the next router. A router that broke a stream is not asked again: its chats go on elsewhere,
and ask again what they got no whole answer to.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.config.settings.settings import MemoryConfig
from shared.core.sampling_params import SamplingParams
from tests.support.web.mixed_clients import EOS, Client

TURNS = 4  # of a chat; then another one begins in its place
FIRST_TOKENS, NEXT_TOKENS, ANSWER_TOKENS = 320, 48, 200  # more than half of each next prompt is known: less is no hit
PAGE_SIZE = MemoryConfig().page_size


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a chat. `known`: tokens of the prompt before, all of which this one begins with."""

    client: Client
    known: int

    @property
    def reusable(self) -> int:
        """Return the tokens that the node of the turn before has in cache: whole pages only."""
        return self.known - self.known % PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens from prefix caches per prompt token: as answers said, and with all chats on a single prefill node."""

    rate: float
    one_node: float


@dataclass(eq=False)
class Chat:
    """`known`: tokens of the last prompt that was answered."""

    prompt: list[int]
    known: int = 0
    num_turns: int = 0


class Chats:
    """Used by one thread per router: a chat is always with one of them, and deques take and give atomically."""

    def __init__(self, numbers: itertools.count[int], routers: Sequence[str], per_router: int) -> None:
        self._numbers = numbers
        self._routers = list(routers)
        self._waiting = {router: deque(self._new_chat() for _ in range(per_router)) for router in routers}
        self.turns: list[Turn] = []
        self.gone: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def client(self, router: str, slot: int) -> Iterator[Client | None]:
        """Yield the turn of a chat that waits for this router, or for one that is gone; None: there is none."""
        chat = self._pick(router)
        if chat is None:
            yield None
            return
        client = make_turn(chat.prompt, next(self._numbers))
        self.turns.append(Turn(client, chat.known))
        yield client
        if client.error:
            self.gone |= {router}
        else:
            chat = self._go_on(chat, client)
        self._waiting[self._after(router)].append(chat)

    def _pick(self, router: str) -> Chat | None:
        for name in () if router in self.gone else (router, *self.gone):
            with contextlib.suppress(IndexError):
                return self._waiting[name].popleft()
        return None

    def _after(self, router: str) -> str:
        return self._routers[(self._routers.index(router) + 1) % len(self._routers)]

    def _new_chat(self) -> Chat:
        return Chat(words(FIRST_TOKENS, next(self._numbers)))

    def _go_on(self, chat: Chat, client: Client) -> Chat:
        if chat.num_turns + 1 == TURNS:
            return self._new_chat()
        said = client.prompt + client.got[0].ids
        return Chat(said + words(NEXT_TOKENS, next(self._numbers)), len(client.prompt), chat.num_turns + 1)

    def hits(self) -> Hits:
        """Of all whole answers."""
        whole = [turn for turn in self.turns if turn.client.usage]
        asked = sum(len(turn.client.prompt) for turn in whole)
        cached = sum(turn.client.usage["prompt_tokens_details"]["cached_tokens"] for turn in whole)
        return Hits(cached / asked, sum(turn.reusable for turn in whole) / asked)


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(EOS), k=count)


def make_turn(prompt: list[int], number: int) -> Client:
    """Return one that is greedy or samples, by its number, and is told what came from caches."""
    temperature = 0.8 * (number % 2)
    fields: dict[str, Any] = {"temperature": temperature, "seed": number, "ignore_eos": True}
    fields["stream_options"] = {"include_usage": True}
    return Client(prompt, fields, SamplingParams(ANSWER_TOKENS, temperature=temperature))
