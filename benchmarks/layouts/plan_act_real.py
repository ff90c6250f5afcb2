"""Measure `baton plan act` on processes, beside fixed splits, under a load of long prompts and then of long answers.

    python -m benchmarks.layouts.plan_act_real [--nodes 6] [--phase-s 120] [--rounds 1] [--splits 2,3,4]
        [--hand-over-all] [--long-prompts 0.2] [--prompt-words 120] [--long-answers 0.475] [--json FILE]

HashLM on a device that sleeps (tests/support/sleepy), so that two cores show six nodes: a step takes 40 ms and 4 ms a
token. Each split is a cluster of its own. By default decode nodes begin prompts that cost less there, which makes up
for some wrong splits. With `--hand-over-all` they begin none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.layouts.plan_act import Phase, shifting_trace
from benchmarks.report import parser_with_json, report
from deploy.cluster.own_cluster import own_cluster
from deploy.tools.plan.router_load import put_load
from shared.core import launcher

ROOT = Path(__file__).resolve().parents[2]
SLO = "ttft<8s,tpot<200ms"
SLEEPY = {"SLEEPY_STEP_S": "0.04", "SLEEPY_TOKEN_S": "0.004"}


def measure(prefill: int, trace: Path, folder: Path, args: argparse.Namespace, *, acts: bool) -> dict[str, Any]:
    nodes = args.nodes
    name = "act" if acts else f"{prefill}P {nodes - prefill}D"
    flags = ["--model", "hashlm", "--prefill", str(prefill), "--decode", str(nodes - prefill), "--max-running", "32"]
    flags += ["--local-prefill-tokens", "0"] if args.hand_over_all else []
    log = folder / f"{name}.log"
    with own_cluster(flags, folder / f"{name}.cluster.log") as url:
        words = launcher.command("deploy.cli", "plan", "act", url, "--slo", SLO)
        with log.open("wb") as sink:
            acting = subprocess.Popen(words, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT) if acts else None
        try:
            summary = put_load(url, ["--trace", str(trace), "--slo", SLO, "--warmup", "0"], api="completions").summary
        finally:
            if acting is not None:
                acting.terminate()
                acting.wait()
    found = {"split": name, "share": summary.slo_share.value, "goodput": summary.goodput.value}
    found |= {"ok": summary.num_ok, "failed": summary.num_failed}
    print(found, flush=True)
    print("\n".join(line for line in log.read_text().splitlines() if "becomes" in line), flush=True)
    return found


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--phase-s", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--splits", default="2,3,4", help="numbers of prefill nodes")
    parser.add_argument("--long-prompts", type=float, default=0.2, help="requests a second and node")
    parser.add_argument("--prompt-words", type=int, default=120, help="mean length of the long prompts")
    parser.add_argument("--long-answers", type=float, default=0.475, help="requests a second and node, of 200 tokens")
    parser.add_argument("--hand-over-all", action="store_true", help="every prompt is computed by a prefill node")
    args = parser.parse_args()
    os.environ.update(SLEEPY, PYTHONPATH=str(ROOT / "tests/support/sleepy"))
    pair = [
        Phase(args.phase_s, args.long_prompts * args.nodes, args.prompt_words, 20),
        Phase(args.phase_s, args.long_answers * args.nodes, 8, 200),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        trace.write_text("".join(json.dumps(row) + "\n" for row in shifting_trace(args.rounds * pair, seed=1)))
        rows = [measure(num, trace, folder, args, acts=False) for num in map(int, args.splits.split(","))]
        rows.append(measure(args.nodes // 2, trace, folder, args, acts=True))
    best = max(row["goodput"] for row in rows[:-1])
    print(f"act: {rows[-1]['goodput'] / best:.2f} times the best fixed split")
    report({"rows": rows, "times_best": rows[-1]["goodput"] / best}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
