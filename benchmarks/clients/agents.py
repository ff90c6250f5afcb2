"""Agents that call tools, as `baton load --agents` sends them: prompt tokens computed and TTFT by turn, by policy.

    python -m benchmarks.clients.agents [--policies prefix_aware,round_robin] [--nodes 4] [--agents 24]
                                [--kv-bytes 4MiB] [--pulls on,off] [--token-ms 0.5] [--seconds 60] [--seeds 1,2]

Each cell is a cluster of its own, with `--nodes` prefill nodes and one decode node. HashLM's device sleeps for each
token, so two cores can show several nodes. Its tokens are characters: texts have a fifth of the words that agents have
by default, and pauses are a fifth as long. With a small `--kv-bytes` a node can't keep all sessions: then a policy that
sends each session to one node lets the nodes' caches together hold more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from typing import Any

from benchmarks.cluster import baton_up
from benchmarks.report import parser_with_json, report
from benchmarks.run import ROOT
from deploy.tools.plan.router_load import put_load
from deploy.tools.traffic.figures.talk_figures import TurnFigures

AGENTS = ("--prefix-tokens", "200", "--prompt-tokens", "mix:6=5,40=3,160=1", "--think", "0.1-6", "--stall", "60")


def turn_row(row: TurnFigures) -> dict[str, Any]:
    ttfts = {f"ttft_{level}_ms": round(1e3 * one.value, 1) for level, one in row.ttft.items()}
    return {"requests": row.num_requests, "failed": row.num_failed, "computed": round(row.computed.value, 4), **ttfts}


def measure(policy: str, pulls: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    flags = ["--model", "hashlm", "--tool-format", "hermes", "--policy", policy, "--prefill", str(args.nodes)]
    flags += ["--pull-prefixes", pulls, "--kv-bytes", args.kv_bytes]
    load = ["--agents", str(args.agents), "--duration", str(args.seconds), "--seed", str(seed), *AGENTS]
    with baton_up(*flags) as port:
        talks = put_load(f"http://127.0.0.1:{port}", load).summary.talks
    return {
        "policy": policy,
        "pulls": pulls,
        "seed": seed,
        "sessions": talks.num_sessions,
        "turns": talks.num_turns,
        "computed": round(talks.computed.value, 4),
        "by_turn": {row.turns: turn_row(row) for row in talks.by_turn},
    }


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--policies", default="prefix_aware,round_robin")
    parser.add_argument("--pulls", default="on", help="on, off or both")
    parser.add_argument("--nodes", type=int, default=4, help="number of prefill nodes")
    parser.add_argument("--agents", type=int, default=24)
    parser.add_argument("--kv-bytes", default="0", help="size of each node's KV pool, as for baton up")
    parser.add_argument("--token-ms", type=float, default=0.5, help="how long a device sleeps for each token")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", default="1")
    args = parser.parse_args()
    os.environ.update(SLEEPY_STEP_S="0.002", SLEEPY_TOKEN_S=str(args.token_ms / 1000))
    os.environ["PYTHONPATH"] = str(ROOT / "tests/support/sleepy")
    words = (text.split(",") for text in (args.policies, args.pulls, args.seeds))
    rows = []
    for policy, pulls, seed in itertools.product(*words):
        rows.append(measure(policy, pulls, int(seed), args))
        print(rows[-1], file=sys.stderr, flush=True)
    report({"rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
