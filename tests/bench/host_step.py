"""What a step costs besides its network: CPU microseconds a step with HashLM, whose forward is next to nothing.

    python -m tests.bench.host_step [--rounds N] [--json FILE]

Scheduling, the step's arrays, sampling, results: all on one thread, inline. `mixed` has every kind of sampling
parameter. Times are the process's own CPU time, so that neighbours matter less. Runs in older checkouts too.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.model.hashlm.model import HashLM
from shared.node.assemble import CoreSizes, assemble_core
from shared.node.core import NodeCore
from shared.sched.settings import SchedSettings
from shared.speculation.ngram import NgramWorkerV2
from tests.bench.report import report

PROMPT, STEPS = 64, 300
WIDTHS = {"plain": 1, "ngram": 4}
GREEDY = (SamplingParams(max_tokens=900, temperature=0.0),)
MIXED = (
    *GREEDY,
    SamplingParams(max_tokens=900, temperature=0.8, repetition_penalty=1.2),
    SamplingParams(max_tokens=900, temperature=0.9, top_p=0.9, num_logprobs=2),
    SamplingParams(max_tokens=900, temperature=1.0, top_k=20, min_tokens=8, stop_token_ids=(3,)),
)


def build(width: int) -> NodeCore:
    settings = SchedSettings(page_size=16, max_context=2048, chunk_size=4096, mixed_chunk_size=4096, width=width)
    drafter = NgramWorkerV2() if width > 1 else None
    sizes = CoreSizes(64 * 70 + 1, 64, prefix_cache=False)
    return assemble_core(HashLM(max_context=2048), make_streams("inline"), settings, sizes, drafter=drafter)


def submit(core: NodeCore, rows: int, kinds: tuple[SamplingParams, ...]) -> None:
    for rid in range(rows):
        prompt = np.random.default_rng(rid).integers(0, 95, PROMPT).astype(np.int64)
        key = RequestKey("bench", 1, f"r{time.monotonic_ns()}", 0, 0)
        core.scheduler.intake.submit(Request(key, prompt, kinds[rid % len(kinds)], 0, rid))


def microseconds(width: int, rows: int, kinds: tuple[SamplingParams, ...]) -> float:
    """Of a decode step: the first decile, for neighbours only ever make one longer."""
    core = build(width)
    submit(core, rows, kinds)
    for _ in range(20):
        core.loop.step(block=True)
    taken = []
    for _ in range(STEPS // width):
        began = time.process_time_ns()
        core.loop.step(block=True)
        core.queues.take_events()
        taken.append((time.process_time_ns() - began) / 1e3)
    core.close()
    return sorted(taken)[len(taken) // 10]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, float] = {}
    for kind, width in WIDTHS.items():
        for name, kinds in (("greedy", GREEDY), ("mixed", MIXED)):
            for rows in (1, 8, 64):
                taken = [microseconds(width, rows, kinds) for _ in range(args.rounds)]
                figures[f"{kind}_{name}_{rows}_us"] = min(taken)
    return report(figures, args.json)


if __name__ == "__main__":
    sys.exit(main())
