"""How fast honest streams are beside a fuzzer, and beside the same fuzzer when it troubles a sink instead: windows of
both in turn, so that whatever else the machine does falls on both."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from tests.support.fuzz.fuzz_cluster import FuzzCluster
from tests.support.fuzz.fuzz_node import FuzzNode
from tests.support.web.mixed_clients import Client, make_client, stream

NUM_STREAMS = 8
MAX_TOKENS = 100
SETTLE_S = 1.0
WINDOW_S = 4.0
KIND = 8  # of the mix: plain and greedy, so that what is counted is tokens of one kind


@dataclass(slots=True)
class Side:
    """What came in all windows of one side: tokens of honest streams, and what the fuzzer sent meanwhile."""

    seconds: float = 0.0
    tokens: int = 0
    sent_bytes: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def text(self) -> str:
        return f"{self.speed:.0f} tokens/s beside {self.sent_bytes / self.seconds / (1 << 20):.1f} MiB/s"


class Streams:
    """Eight streams at a time, one after another, checked as they end."""

    def __init__(self, cluster: FuzzCluster, fuzzer: FuzzNode | None) -> None:
        self._cluster, self._fuzzer = cluster, fuzzer
        self._ended = 0
        self._open: dict[int, Client] = {}
        self._numbers = itertools.count(1_000_000 // KIND)

    @property
    def tokens(self) -> int:
        return self._ended + sum(client.num_tokens for client in self._open.values())

    async def run(self) -> None:
        async with self._cluster.http() as http, asyncio.TaskGroup() as tasks:
            for place in range(NUM_STREAMS):
                tasks.create_task(self._one_after_another(http, place))

    async def _one_after_another(self, http: object, place: int) -> None:
        while True:
            client = self._open[place] = make_client(KIND * next(self._numbers), MAX_TOKENS, prompt_len=64)
            await stream(http, self._cluster.url, client)  # type: ignore[arg-type]
            self._ended += self._open.pop(place).num_tokens
            self._cluster.judge(client, self._fuzzer)
            self._cluster.check_alive()


async def compare(
    streams: Streams, aims: dict[str, Callable[[], None]], sent_bytes: Callable[[], int], seconds: float
) -> dict[str, Side]:
    """aims: by side, what makes the fuzzer turn there. At least two windows of each."""
    sides = {name: Side() for name in aims}
    running = asyncio.create_task(streams.run())
    try:
        for _ in range(max(2, round(seconds / (len(aims) * (SETTLE_S + WINDOW_S))))):
            for name, aim in aims.items():
                aim()
                await _let(running, SETTLE_S)
                begun, tokens, sent = monotonic(), streams.tokens, sent_bytes()
                await _let(running, WINDOW_S)
                side = sides[name]
                side.seconds += monotonic() - begun
                side.tokens += streams.tokens - tokens
                side.sent_bytes += sent_bytes() - sent
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return sides


async def _let(running: asyncio.Task[None], seconds: float) -> None:
    """Wait; raise what a stream raises."""
    await asyncio.wait([running], timeout=seconds)
    if running.done():
        running.result()
