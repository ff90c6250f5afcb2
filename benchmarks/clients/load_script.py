"""Measured against a script: a server whose TTFT and ITL are known, seen by `baton load` and by aiperf.

    python -m benchmarks.clients.load_script [--ttft 0.2] [--itl 0.02] [--requests 120] [--no-aiperf]

Both should be within 5 % of the script.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from benchmarks.clients import aiperf, load_tool
from benchmarks.clients.aiperf import Figures, Workload
from benchmarks.report import parser_with_json, report

NEEDED = 0.05


def off_by(found: Figures, ttft_ms: float, tpot_ms: float) -> dict[str, float]:
    """Relative error of each figure."""
    return {
        "ttft_p50": found.ttft_p50 / ttft_ms - 1,
        "ttft_mean": found.ttft_mean / ttft_ms - 1,
        "tpot_p50": found.tpot_p50 / tpot_ms - 1,
        "tpot_mean": found.tpot_mean / tpot_ms - 1,
    }


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--ttft", type=float, default=0.2)
    parser.add_argument("--itl", type=float, default=0.02)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--no-aiperf", action="store_true")
    args = parser.parse_args()
    workload = Workload(tuple(f"What is {i}?" for i in range(args.requests)), args.rate, 32)
    with load_tool.scripted_server(args.ttft, args.itl) as url:
        found = {"baton load": load_tool.measure(url, workload)}
        if not args.no_aiperf:
            found["aiperf"] = aiperf.measure(url, "mock", workload)
    errors = {name: off_by(one, 1e3 * args.ttft, 1e3 * args.itl) for name, one in found.items()}
    worst = {name: max(map(abs, one.values())) for name, one in errors.items()}
    figures = {name: asdict(one) for name, one in found.items()}
    report({"measured_ms": figures, "relative_error": errors, "worst": worst}, args.json)
    return 0 if all(one <= NEEDED for one in worst.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
