"""`baton load` and aiperf on the real engine, run by run in turn: the same prompts, rate and lengths.

    python -m benchmarks.clients.load_versus_aiperf [--runs 5] [--rate 2] [--requests 60] [--model smollm2]

The prefix cache is off, so that no run profits from the one before. Compared are the medians over the runs; they should
be within 15 % of each other. Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import asdict, fields

from benchmarks.clients import aiperf, load_tool
from benchmarks.clients.aiperf import Figures, Workload
from benchmarks.cluster import baton_up
from benchmarks.report import parser_with_json, report
from deploy.tools.traffic.workloads.workload import text_of

NEEDED = 0.15
COMPARED = ("ttft_p50", "ttft_mean", "tpot_p50", "tpot_mean", "e2e_p50")


def workload(args: argparse.Namespace, run: int) -> Workload:
    texts = [text_of(random.Random(f"{run} {i}"), args.prompt_tokens) for i in range(args.requests)]
    return Workload(tuple(texts), args.rate, args.output_tokens)


def medians(runs: list[Figures]) -> dict[str, float]:
    return {field.name: statistics.median(getattr(run, field.name) for run in runs) for field in fields(Figures)}


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    aiperf.tool()  # made before anything is measured
    ours: list[Figures] = []
    theirs: list[Figures] = []
    with baton_up("--model", args.model, "--served-model-name", "bench", "--no-prefix-cache") as port:
        url = f"http://127.0.0.1:{port}"
        load_tool.measure(url, workload(args, -1))  # compiled and warm for both
        for run in range(args.runs):
            mine, others = one_of_each(url, workload(args, run), ours_first=run % 2 == 0)
            ours.append(mine)
            theirs.append(others)
            print(f"run {run}: baton load {ours[-1]}, aiperf {theirs[-1]}", file=sys.stderr)
    first, second = medians(ours), medians(theirs)
    apart = {name: first[name] / second[name] - 1 for name in COMPARED}
    every = {"baton load": [asdict(one) for one in ours], "aiperf": [asdict(one) for one in theirs]}
    report({"baton load": first, "aiperf": second, "apart": apart, "runs": every}, args.json)
    return 0 if all(abs(one) <= NEEDED for one in apart.values()) else 1


def one_of_each(url: str, asked: Workload, *, ours_first: bool) -> tuple[Figures, Figures]:
    if ours_first:
        return load_tool.measure(url, asked), aiperf.measure(url, "bench", asked)
    others = aiperf.measure(url, "bench", asked)
    return load_tool.measure(url, asked), others


if __name__ == "__main__":
    sys.exit(main())
