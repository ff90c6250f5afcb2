"""What `--growth-reserve` trades: pauses of streams that began, against later first tokens and more steps.

    python -m benchmarks.layouts.growth [--load NAME]

It counts steps of the production scheduler, without a model, so that a busy machine changes nothing. No request tells
its length: `max_tokens` is far above it. `known`: the same rule, if each request's `max_tokens` were its length.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deploy.tools.plan.timed_node import TimedNode, VirtualClock
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.engine.plan import Int64s
from shared.sched.requests.answer_lengths import LengthEstimator, Survival
from shared.sched.scheduler import make_scheduler
from shared.sched.steps.events import Emitted, Ended
from shared.sched.steps.settings import SchedSettings

PAGE, PAGES, ROWS, PROMPT, CHUNK = 16, 16 * 27 + 1, 128, 32, 512
CONTEXT = 4096
END, TEXT = 1, 2  # tokens
PAUSE = 20  # steps; a longer wait in mid-answer counts
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Answer:
    length: int
    max_tokens: int
    tenant: int = 0
    at: int = 0  # step at which the request comes


class KnownLengths(LengthEstimator):
    """Nothing ends before its `max_tokens`."""

    def survival(self, group: int, running: Int64s) -> Survival:
        return Survival(np.zeros(1), 0.0)


@dataclass(frozen=True, slots=True)
class Figures:
    steps: int
    retractions: int
    prompt_share: float  # computed prompt tokens, divided by the least possible
    pauses: tuple[int, ...]  # longest pause of each stream that paused
    first_tokens: tuple[int, ...]  # step of each request's first token, from its arrival
    num_streams: int

    @property
    def paused_share(self) -> float:
        return len(self.pauses) / self.num_streams

    def __str__(self) -> str:
        median, longest = (statistics.median(self.pauses), max(self.pauses)) if self.pauses else (0, 0)
        first = sorted(self.first_tokens)
        return (
            f"{self.steps:6} {self.retractions:6} {self.prompt_share:8.2f} {len(self.pauses):4}/{self.num_streams} "
            f"{median:8.0f} {longest:8} {statistics.median(first):8.0f} {first[len(first) * 9 // 10]:8}"
        )


class Study:
    """One node, and what its clients saw."""

    def __init__(self, answers: list[Answer], share: float, known: bool) -> None:
        self._answers, self._known = answers, known
        settings = SchedSettings(PAGE, CONTEXT, CHUNK, CHUNK, growth_reserve=share)
        self._clock = VirtualClock()
        scheduler = make_scheduler(settings, PAGES, ROWS)
        if known:
            scheduler.queues.lengths = KnownLengths()
        self._node = TimedNode(self._clock, scheduler, lambda shape, begin: 1.0, self._token)
        self._queues = scheduler.queues
        self._seen: dict[int, int] = {}  # request -> tokens
        self._last: dict[int, int] = {}  # request -> step of its latest token
        self._waits: dict[int, int] = {}  # request -> longest wait after its first token
        self._first: dict[int, int] = {}
        self._num_open = len(answers)

    def _token(self, key: RequestKey, position: int) -> int:
        return END if position + 1 >= self._answers[int(key.rid)].length else TEXT

    def run(self) -> Figures:
        coming = sorted(range(len(self._answers)), key=lambda i: self._answers[i].at)
        while self._num_open:
            while coming and self._answers[coming[0]].at <= self._clock.now:
                self._node.submit(self._request(coming.pop(0)))
            self._node.turn()
            self._watch()
            next_at = self._node.next_at()
            self._clock.now = next_at if next_at is not None else self._clock.now + 1
        counters, num = self._queues.counters, len(self._answers)
        pauses = tuple(wait for wait in self._waits.values() if wait > PAUSE)
        first = tuple(self._first.values())
        steps = int(self._clock.now)
        return Figures(steps, counters.retractions, counters.prompt_tokens / (PROMPT * num), pauses, first, num)

    def _request(self, index: int) -> Request:
        answer = self._answers[index]
        most = answer.length if self._known else answer.max_tokens
        sampling = SamplingParams(max_tokens=most, temperature=0.0, stop_token_ids=(END,))
        prompt = np.random.default_rng(index).integers(3, 1 << 20, PROMPT)
        return Request(
            RequestKey("study", 1, str(index), 0, 0), NodeAsk(prompt, sampling, 0, tenant=answer.tenant), index
        )

    def _watch(self) -> None:
        now = int(self._clock.now)
        for event in self._queues.take_events():
            index = int(event.key.rid) if isinstance(event, Emitted | Ended) else -1
            if isinstance(event, Ended):
                self._num_open -= 1
            elif isinstance(event, Emitted) and event.first_pos + len(event.ids) > self._seen.get(index, 0):
                self._seen[index] = event.first_pos + len(event.ids)
                self._first.setdefault(index, now - self._answers[index].at)
                self._waits[index] = max(self._waits.get(index, 0), now - self._last.get(index, now))
                self._last[index] = now


def study(answers: list[Answer], share: float, known: bool = False) -> Figures:
    return Study(answers, share, known).run()


def thrash(seed: int = 1) -> list[Answer]:
    """A burst of 128 requests for a pool that holds 16 of the longest."""
    rng = random.Random(seed)
    return [Answer(rng.randrange(40, 440), 440) for _ in range(128)]


def two_tenants(known: bool = True) -> list[Answer]:
    """Every second request has a short answer. `known`: whether the node can tell the tenants apart."""
    rng = random.Random(7)
    ranges = ((20, 60), (300, 600))
    return [Answer(rng.randrange(*ranges[i % 2]), 800, (1 + i % 2) if known else 0) for i in range(160)]


def changing() -> list[Answer]:
    """A steady load, whose answers suddenly get seven times as long."""
    rng = random.Random(7)
    return [Answer(rng.randrange(*((20, 80) if i < 150 else (300, 600))), 800, 0, 4 * i) for i in range(250)]


def outlier() -> list[Answer]:
    """One answer of ten times the mean."""
    rng = random.Random(7)
    return [Answer(2000 if i == 20 else rng.randrange(100, 300), 2400) for i in range(128)]


def unbounded() -> list[Answer]:
    """No request has max_tokens, so the context is the only bound."""
    return [Answer(answer.length, CONTEXT - PROMPT - 8) for answer in thrash()]


LOADS: dict[str, Callable[[], list[Answer]]] = {
    "thrash": thrash,
    "equal": lambda: [Answer(400, 440) for _ in range(128)],
    "two tenants": two_tenants,
    "two tenants, unknown": lambda: two_tenants(known=False),
    "changing": changing,
    "outlier": outlier,
    "unbounded": unbounded,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, help="(default: all)")
    asked = parser.parse_args().load
    for name in [asked] if asked else LOADS:
        print(f"{name}\n  reserve  steps  again  prompts   paused   median  longest    first  9 of 10")
        for share in SHARES:
            print(f"  {share:7} {study(LOADS[name](), share)}", flush=True)
        print(f"  {'known':>7} {study(LOADS[name](), 1.0, known=True)}", flush=True)


if __name__ == "__main__":
    main()
