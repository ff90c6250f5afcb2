"""A load that shifts between long prompts and long answers: every fixed split of the nodes beside `baton plan act`.

    python -m benchmarks.layouts.plan_act [--nodes 8] [--phase-s 240] [--rounds 2] [--profile FILE] [--json FILE]

Simulated, with a made-up profile unless one is given (`baton plan measure`). Goodput is of all requests within the SLO.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import parser_with_json, report
from deploy.tools.plan import profile as profiles
from deploy.tools.plan.act.balance import Balancer, BalanceSettings
from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.simulate import play_virtual
from deploy.tools.plan.tokens import SimTokens
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.load_plan import LoadPlan
from router.text.load import load_text_model
from tests.support.worlds import plan_cases as made
from tests.support.worlds.acting_cluster import ActingCluster

BLOCK = 512  # of a trace; each prompt has blocks of its own
SLO = "ttft<2s,tpot<50ms"


@dataclass(frozen=True, slots=True)
class Phase:
    """`rate` requests a second, their prompts and answers between half and one and a half times this long."""

    seconds: float
    rate: float
    prompt_words: int
    answer_tokens: int


def shifting_trace(phases: Sequence[Phase], seed: int) -> Iterator[dict[str, Any]]:
    """Rows in Mooncake's format; arrivals are Poisson."""
    rng, begin, number = random.Random(seed), 0.0, 0
    for phase in phases:
        at = begin + rng.expovariate(phase.rate)
        while at < begin + phase.seconds:
            words = max(1, round(phase.prompt_words * rng.uniform(0.5, 1.5)))
            blocks = [number + i for i in range(-(-words // BLOCK))]
            number += len(blocks)
            answer = max(1, round(phase.answer_tokens * rng.uniform(0.5, 1.5)))
            yield {"timestamp": int(1000 * at), "input_length": words, "output_length": answer, "hash_ids": blocks}
            at += rng.expovariate(phase.rate)
        begin += phase.seconds


def row(name: str, records: Sequence[RequestRecord], plan: LoadPlan) -> dict[str, Any]:
    good = sum(map(plan.slo.is_met, records))
    print(f"{name:12} {good:6} of {len(records)} within {plan.slo}", flush=True)
    return {"split": name, "good": good, "requests": len(records)}


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--phase-s", type=float, default=240.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--long-prompts", type=float, default=0.8, help="requests a second and node, of 120 words")
    parser.add_argument("--long-answers", type=float, default=1.9, help="requests a second and node, of 200 tokens")
    parser.add_argument("--restart-s", type=float, default=10.0)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    profile = profiles.read(args.profile) if args.profile else made.profile(num_pages=2000)
    tokens = SimTokens(load_text_model(profile.model))
    pair = [
        Phase(args.phase_s, args.long_prompts * args.nodes, 120, 20),
        Phase(args.phase_s, args.long_answers * args.nodes, 8, 200),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in shifting_trace(args.rounds * pair, seed=1)))
        plan = made.plan("--trace", str(path), "--slo", SLO)
    cores = min(profile.nodes)

    def layout(prefill: int) -> ClusterLayout:
        return made.layout(prefill, args.nodes - prefill, cores=cores)

    rows = [
        row(f"{num}P {args.nodes - num}D", play_virtual(layout(num), profile, tokens, plan)[0], plan)
        for num in range(1, args.nodes)
    ]
    balancer = Balancer(BalanceSettings(tpot_s=plan.slo.tpot))
    cluster = ActingCluster(layout(args.nodes // 2), profile, tokens, balancer, args.restart_s)
    driver = plan.load.driver([], plan.truth.every)
    acting = row("act", cluster.play(driver, plan.load.duration_s + plan.drain_s), plan)
    best = max(one["good"] for one in rows)
    print(f"act: {acting['good'] / best:.2f} times the best fixed split, {len(cluster.moves)} nodes changed over")
    report({"rows": [*rows, acting], "times_best": acting["good"] / best, "moves": len(cluster.moves)}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
