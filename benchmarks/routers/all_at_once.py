"""Send 2,000 requests at once to one router: how late are nodes' messages read, and who is refused or lost?

    python -m benchmarks.routers.all_at_once [--streams 2000] [--prompt-tokens 200] [--max-tokens 16]

Router, one prefill and one decode node (benchmarks.paced_nodes) and clients (benchmarks.routers.stream_clients) are
three processes. The nodes send a heartbeat every 50 ms, and its delay is the time until the router has read it. On a
busy machine, compare the delays in CPU time of the router's loop (`read_cpu_ms`). Exit status 1 when the delay's p99 is
200 ms or more, its maximum is 1 s or more, a node was lost, or a request was neither served to its end nor refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.probed_router import BEATS, read_lags
from benchmarks.report import parser_with_json, report
from benchmarks.routers.open_streams import Child, lag_ms, running, usage, wait_for_nodes
from tests.support.clusters.router_process import RouterProcess

BEAT_S = 0.05
MOST_P99_MS, MOST_MS = 200.0, 1000.0
LEAST_SERVED = 1024  # by default, 512 requests run and 512 wait
END_S = 60.0


def send_all(
    router: RouterProcess, args: argparse.Namespace, beats: Path
) -> tuple[dict[str, Any], tuple[float, float]]:
    """Return figures, and when the requests began and ended."""
    paced = [router.nodes, "--tokens-per-s", str(args.tokens_per_s), "--streams", "512", "--nodes", "1"]
    paced += ["--prefill", "1", "--beat-s", str(BEAT_S), "--beats", str(beats)]
    words = [router.url.rpartition(":")[2], "--streams", str(args.streams), "--together"]
    words += ["--chat", "--prompt-tokens", str(args.prompt_tokens), "--max-tokens", str(args.max_tokens)]
    with running(Child("benchmarks.paced_nodes", *paced)):
        wait_for_nodes(router, 2)
        cpu_before, _ = usage(router.process.pid)
        began = time.monotonic()
        with running(Child("benchmarks.routers.stream_clients", *words)) as clients:
            counts = answered = clients.read()
            while counts["whole"] < counts["statuses"].get("200", 0) and time.monotonic() < began + END_S:
                time.sleep(0.2)
                counts = clients.ask()
        cpu_s = usage(router.process.pid)[0] - cpu_before
        num_lost = sum("node is lost" in line for line in router.lines)
    figures = {key: counts[key] for key in ("statuses", "whole", "lost")}
    figures |= {"answered_s": round(answered["at"] - began, 2), "router_cpu_s": round(cpu_s, 2)}
    figures |= {"outcomes": router.outcomes(), "nodes_lost": num_lost}
    return figures, (began, counts["at"])


def delays(sent: Path, read: Path, begin: float, end: float) -> tuple[list[float], list[float]]:
    """Return how late each heartbeat of this time was read: on the clock, and in CPU time of the router's loop.

    A node's connection keeps their order. Between two reads, CPU time is taken to pass evenly."""
    was_sent, was_read = json.loads(sent.read_text()), json.loads(read.read_text())
    clock, cpu = zip(*sorted(map(tuple, itertools.chain.from_iterable(was_read.values()))), strict=True)
    pairs = [pair for node in was_sent for pair in zip(was_sent[node], was_read.get(node, ()), strict=False)]
    chosen = [(sent_at, read_at) for sent_at, read_at in pairs if begin <= sent_at < end]
    cpu_then = np.interp([sent_at for sent_at, _ in chosen], clock, cpu)
    cpu_late = [cpu_at - then for (_, (_, cpu_at)), then in zip(chosen, cpu_then.tolist(), strict=True)]
    return [read_at - sent_at for sent_at, (read_at, _) in chosen], cpu_late


def is_good(figures: dict[str, Any], num_streams: int) -> bool:
    statuses, delay = figures["statuses"], figures["read_ms"]
    served = statuses.get("200", 0)
    all_answered = served + statuses.get("503", 0) == num_streams
    is_served = served == figures["whole"] >= min(LEAST_SERVED, num_streams) and not figures["lost"]
    in_time = delay["p99"] < MOST_P99_MS and delay["max"] < MOST_MS
    return all_answered and is_served and in_time and not figures["nodes_lost"]


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--tokens-per-s", type=float, default=2_000.0)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer the router has")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lags, beats = Path(folder) / "lags", Path(folder) / "beats-sent.json"
        program = (sys.executable, "-m", "benchmarks.probed_router", str(lags))
        router = RouterProcess("--served-model-name", "bench", model=args.model, program=program)
        try:
            figures, phase = send_all(router, args, beats)
        finally:
            router.stop()
        late, cpu_late = delays(beats, lags.with_name(BEATS), *phase)
        figures |= {"read_ms": lag_ms(late), "read_cpu_ms": lag_ms(cpu_late)}
        figures["loop_lag_ms"] = lag_ms(read_lags(lags, *phase))
        figures["frozen"] = [line for line in router.lines if "was frozen" in line]
    report({"streams": args.streams, "prompt_tokens": args.prompt_tokens, **figures}, args.json)
    return 0 if is_good(figures, args.streams) else 1


if __name__ == "__main__":
    sys.exit(main())
