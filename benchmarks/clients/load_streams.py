"""How many streams `baton load` itself can watch: 2,000 at once at 2 tokens a second each, from a scripted server on
this machine, and how late it was in sending and in handling what had arrived.

    python -m benchmarks.clients.load_streams [--streams 2000] [--tokens-per-s 4000]

The p99 of both should be at most 20 ms.
"""

from __future__ import annotations

import sys

from benchmarks.clients.load_tool import run_load, scripted_server
from benchmarks.report import parser_with_json, report

NEEDED_S = 0.020
BEGIN_S = 10.0  # in which the streams begin, so that their tokens are spread evenly
TOKENS = 64


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens-per-s", type=float, default=4000.0)
    args = parser.parse_args()
    itl_s = args.streams / args.tokens_per_s
    flags = ["--arrivals", "constant", "--rate", str(args.streams / BEGIN_S), "--duration", str(BEGIN_S)]
    flags += ["--output-tokens", str(TOKENS), "--prompt-tokens", "16", "--golden", "0", "--slo", ""]
    with scripted_server(itl_s, itl_s) as url:
        found = run_load(url, *flags)
    lag, series = found["summary"]["lag"], found["series"]
    steady = range(int(BEGIN_S) + 2, int(BEGIN_S) + 2 + int(TOKENS * itl_s - BEGIN_S - 4))
    figures = {
        "streams_at_once": min(series["open_requests"][second] for second in steady),
        "tokens_per_s": sum(series["tokens"][second] for second in steady) / len(steady),
        "own_lag_ms": {name: 1e3 * value for name, value in lag.items() if value is not None},
        "tpot_p50_ms": 1e3 * found["summary"]["latencies"]["tpot"]["p50"]["value"],
        "script_ms": 1e3 * itl_s,
    }
    report(figures, args.json)
    return 0 if max(lag["send_p99"], lag["handle_p99"] or 0.0) <= NEEDED_S else 1


if __name__ == "__main__":
    sys.exit(main())
