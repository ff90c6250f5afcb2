"""What a plan costs a prefill node with a long queue: milliseconds of `plan`, nothing is launched.

    python -m tests.bench.planning [--waiting N] [--rounds N]

    own         each prompt is another one            shared      all begin with the same cached tokens
    ungranted   no decode node has answered           granted     all have     both        every second one has

Memory is full of hand-offs that nobody has taken over. The aim is under 1 ms with 1,000 waiting.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.model.hashlm.model import HashLM
from shared.node.assemble import CoreSizes, assemble_core
from shared.node.core import NodeCore
from shared.sched.settings import SchedSettings

PROMPT, STEM, PAGES, AIM_MS = 1500, 1024, 400, 1.0


def build() -> NodeCore:
    settings = SchedSettings(page_size=16, max_context=2048, chunk_size=2048, mixed_chunk_size=2048)
    return assemble_core(HashLM(max_context=2048), make_streams("inline"), settings, CoreSizes(PAGES, 64))


def submit(core: NodeCore, rid: int, shared: bool, granted: bool) -> None:
    rng = np.random.default_rng(rid)
    prompt = rng.integers(0, 95, PROMPT)
    if shared:
        prompt[:STEM] = 7
    key = RequestKey("bench", 1, f"r{rid}", 0, 0)
    sampling = SamplingParams(max_tokens=16, temperature=0.0)
    core.scheduler.intake.submit(Request(key, prompt.astype(np.int64), sampling, 0, rid, handoff_to="decode"))
    if granted:
        core.queues.set_granted(key)


def fill(core: NodeCore, shared: bool) -> None:
    """Prompts with a grant until no more of them fit."""
    for rid in range(PAGES):
        submit(core, rid, shared, granted=True)
        core.loop.step(block=True)
        while not core.loop.idle:
            core.loop.step(block=True)
        if core.queues.waiting:
            core.queues.abort(core.queues.waiting[0].key)
            return


def measure(kind: str, shared: bool, waiting: int, rounds: int) -> float:
    """Median milliseconds of a plan."""
    core = build()
    fill(core, shared)
    for rid in range(waiting):
        submit(core, 10_000 + rid, shared, granted=kind == "granted" or kind == "both" and rid % 2 == 1)
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        plan = core.scheduler.planner.plan()
        took.append(1e3 * (time.perf_counter() - start))
        assert plan is None and len(core.queues.waiting) == waiting
    core.close()
    return statistics.median(took)


def main() -> int:
    parser = argparse.ArgumentParser(description="Milliseconds of a plan before a long queue")
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    for kind, shared in itertools.product(("ungranted", "granted", "both"), (False, True)):
        took = measure(kind, shared, args.waiting, args.rounds)
        prompts = "shared" if shared else "own"
        print(f"{kind:10} {prompts:7} {took:7.2f} ms{'  SLOW' if took > AIM_MS else ''}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
