"""What --itl-budget trades: ITL of running streams against the first token of long prompts, on one node alone.

    python -m benchmarks.engine.itl_budget [--rounds 6] [--threads 2] [--budgets 30 60]

Four streams run; one prompt of 1,500 tokens at a time joins them. In each round the settings take turns in a drawn
order: chunks of a fixed size, and budgets in milliseconds with chunks of up to 256 tokens. Milliseconds; `chunk`: mean
prompt tokens of a step.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.engine_core import build
from benchmarks.report import parser_with_json, report
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.node.records.core import NodeCore
from shared.sched.steps.events import Emitted
from shared.sched.steps.mixed_chunk import FixedChunk, MixedChunk, make_mixed_chunk

STREAMS, STREAM_PROMPT, STREAM_TOKENS = 4, 64, 1900
LONG_PROMPT = 1500
MOST = 256  # prompt tokens of a step
QUIET_S = 0.5


@dataclass(slots=True)
class Found:
    """Seconds, and tokens a step."""

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        p50, p99 = 1e3 * np.percentile(self.gaps, (50, 99))
        first = 1e3 * float(np.median(self.first_tokens))
        return {"itl_p50": p50, "itl_p99": p99, "ttft_long": first, "chunk": float(np.mean(self.chunks))}


class Driver:
    """Steps a core, and notes when whose tokens come."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._rng = np.random.default_rng(3)
        self._count = 0
        self.last: dict[RequestKey, float] = {}

    def submit(self, prompt: int, answer: int) -> RequestKey:
        self._count += 1
        key, ids = RequestKey("bench", 1, str(self._count), 0, 0), self._rng.integers(100, 40_000, prompt)
        greedy = SamplingParams(max_tokens=answer, temperature=0.0)
        self._core.scheduler.intake.submit(Request(key, NodeAsk(ids.astype(np.int64), greedy, 0), self._count))
        return key

    def run(self, until: Callable[[], bool]) -> list[float]:
        """Seconds between a stream's tokens, of all streams."""
        gaps = []
        while not until():
            self._core.loop.step(block=True)
            now = time.perf_counter()
            for event in self._core.queues.take_events():
                if isinstance(event, Emitted):
                    if event.key in self.last:
                        gaps.append(now - self.last[event.key])
                    self.last[event.key] = now
        return gaps

    def stop(self) -> None:
        for key in list(self._core.requests):
            self._core.queues.abort(key)
        while self._core.queues.requests or not self._core.loop.idle:
            self._core.loop.step(block=True)
        self._core.queues.take_events()
        self.last.clear()


def one_turn(core: NodeCore, driver: Driver, chunk: MixedChunk, found: Found, quiet: list[float]) -> None:
    counters = core.queues.counters
    streams = {driver.submit(STREAM_PROMPT, STREAM_TOKENS) for _ in range(STREAMS)}
    driver.run(lambda: streams <= driver.last.keys())
    core.scheduler.planner.mixed_chunk = chunk
    end = time.perf_counter() + QUIET_S
    quiet += driver.run(lambda: time.perf_counter() > end)
    steps, tokens, start = counters.mixed_steps, counters.mixed_prompt_tokens, time.perf_counter()
    long = driver.submit(LONG_PROMPT, 1)
    found.gaps += driver.run(lambda: long in driver.last)
    found.first_tokens.append(time.perf_counter() - start)
    found.chunks.append((counters.mixed_prompt_tokens - tokens) / max(1, counters.mixed_steps - steps))
    driver.stop()


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budgets", type=float, nargs="+", default=[30.0, 60.0])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    core = build(load_model("smollm2", LoadOptions("auto", threads=args.threads)), args.threads, overlap=True)
    settings: dict[str, MixedChunk] = {f"fixed {size}": FixedChunk(size) for size in (64, MOST)}
    settings |= {f"budget {ms:g}": make_mixed_chunk(ms, MOST) for ms in args.budgets}
    found, quiet, driver = {name: Found() for name in settings}, [], Driver(core)
    order, rng = list(settings), random.Random(3)
    try:
        for _ in range(args.rounds):
            rng.shuffle(order)
            for name in order:
                one_turn(core, driver, settings[name], found[name], quiet)
    finally:
        core.close()
    figures = {f"{name}, {key}": value for name, one in found.items() for key, value in one.figures().items()}
    report({"quiet, itl_p99": 1e3 * float(np.percentile(quiet, 99))} | figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
