"""Measure steps of one node's engine, and their shapes, under a set of loads.

The scheduler and the overlap loop run as in production. This module loads torch, so cores must be assigned before its
import.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from deploy.tools.plan.profile import MeasuredSteps, StepShape
from shared.config.processes import NodeProcessConfig
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.engine.plan import RowId, StepResult
from shared.kv.layout import page_bytes
from shared.node.assembly.build_core import build_core
from shared.node.assembly.warm_up import warm_up
from shared.node.machine.cores import NodeCores
from shared.node.records.core import NodeCore
from shared.observe.log import Logger
from shared.ranks.leader import RankProcesses

PROMPTS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 1800)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (32, 384, 1500)
MIXED_BATCHES = (1, 4, 8, 16)
MIXED_PROMPTS = (8, 16, 32, 64, 128, 256, 512)
# for each decode row of a step with prompts: context tokens, answer tokens
SHORT_CONTEXT, MIXED_ANSWER = 64, 700
DECODE_STEPS = 10
ROUNDS = 2
MOST_CONTEXT_TOKENS = 6_500  # limit of context tokens in a batch, since prompts are slow on CPUs


class StepLog:
    """Record steps, in place of the scheduler's `WidthChoice`, which sees each plan and result.

    Each row decodes one token per step.
    """

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []
        self.seconds: list[float] = []
        self._planned_at = 0.0
        self._launched_at: deque[float] = deque()  # when each running step was planned
        self._committed: dict[RowId, int] = {}
        self._last_end = 0.0

    def choose(self, num_rows: int) -> int:
        self._planned_at = time.perf_counter()
        return 1

    def launched(self) -> None:
        self._launched_at.append(self._planned_at)

    def observe(self, result: StepResult) -> None:
        """Record a step's time, from its planning or from the previous step's end, whichever is later."""
        now = time.perf_counter()
        begin = max(self._last_end, self._launched_at.popleft())
        self.shapes.append(self._shape(result))
        self.seconds.append(now - begin)
        self._last_end = now

    def _shape(self, result: StepResult) -> StepShape:
        after = result.seq_lens.tolist()
        before = [self._committed.get(row_id, 0) for row_id in result.row_ids[: result.num_prefill]]
        self._committed.update(zip(result.row_ids, after, strict=True))
        chunks = [(first, last - first) for first, last in zip(before, after, strict=False)]
        decoding = after[result.num_prefill :]
        return StepShape(
            tokens=sum(length for _, length in chunks) + len(decoding),
            samples=int((result.accept_lens > 0).sum()),
            pairs=sum(length * first + length * (length + 1) // 2 for first, length in chunks),
            keys=sum(decoding),
        )


class Bench:
    def __init__(self, core: NodeCore) -> None:
        self.core = core
        self.log = StepLog()
        core.scheduler.planner.widths = self.log
        self._num_asked = 0

    def ask(self, prompt_tokens: int, output_tokens: int) -> None:
        rng = np.random.default_rng(self._num_asked)
        most = self.core.spec.vocab_size
        prompt = rng.integers(most // 10, most, prompt_tokens).astype(np.int64)
        key = RequestKey("plan", 0, str(self._num_asked), 0, 0)
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
        self.core.submit(Request(key, NodeAsk(prompt, sampling, 0), arrival=self._num_asked))
        self._num_asked += 1

    def turn(self) -> None:
        num_steps = self.core.loop.num_steps
        self.core.step(block=True)
        if self.core.loop.num_steps > num_steps:
            self.log.launched()
        self.core.take_events()

    def finish(self, left: int = 0) -> None:
        while len(self.core.requests) > left or (not left and not self.core.loop.idle):
            self.turn()

    def until_running(self, num_rows: int) -> None:
        queues = self.core.queues
        while len(queues.running) < num_rows or queues.prefilling or queues.waiting:
            self.turn()

    # ---- loads

    def prompts(self) -> None:
        for length in PROMPTS:
            if length < self.core.settings.max_context:
                self.ask(length, 1)
                self.finish()

    def batches(self) -> None:
        for num_rows in BATCHES:
            for context in CONTEXTS:
                fits = context + DECODE_STEPS < self.core.settings.max_context
                if num_rows <= self.core.kv.rows.num_free and num_rows * context <= MOST_CONTEXT_TOKENS and fits:
                    for _ in range(num_rows):
                        self.ask(context, DECODE_STEPS)
                    self.finish()

    def mixed(self) -> None:
        """Prompts that fit in a mixed chunk share a step with the decode rows."""
        most = self.core.settings.max_context - 1
        for num_rows in MIXED_BATCHES:
            if num_rows >= self.core.kv.rows.num_free:
                continue
            for _ in range(num_rows):
                self.ask(SHORT_CONTEXT, min(MIXED_ANSWER, most - SHORT_CONTEXT))
            self.until_running(num_rows)
            for length in (length for length in MIXED_PROMPTS if length < most):
                self.ask(length, 1)
                self.finish(left=num_rows)
            for request in list(self.core.requests):
                self.core.abort(request)
            self.finish()


def serve(config: NodeProcessConfig, out: Path | None) -> int:
    log = Logger("plan", sys.stderr, level="warning")
    cores = NodeCores(config.cores, config.parts.parallel, "plan")
    sched = replace(config.parts.sched, growth_reserve=0.0)  # the batches' sizes are given
    config = replace(config, parts=replace(config.parts, sched=sched))
    core = build_core(config, log, lambda: None, RankProcesses(config, "plan"), cores)
    warm_up(core, log)
    bench = Bench(core)
    bench.mixed()
    bench.log = core.scheduler.planner.widths = StepLog()
    if out is None:
        print("busy", flush=True)
        while True:
            bench.mixed()
            bench.batches()
    for number in range(ROUNDS):
        for part in (bench.prompts, bench.batches, bench.mixed):
            part()
            print(f"round {number + 1} of {ROUNDS}: {part.__name__}, {len(bench.log.shapes)} steps", flush=True)
    settings = core.settings
    steps = MeasuredSteps(
        bench.log.shapes,
        bench.log.seconds,
        1 + core.kv.allocator.num_total // core.kv.num_groups,  # the planner knows one page per page of tokens
        settings.max_context,
        page_bytes(core.pool.planes) * core.kv.num_groups,
    )
    out.write_bytes(msgspec.json.encode(steps))
    core.close()
    cores.close()
    return 0
