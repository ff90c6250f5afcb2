"""Asks a healthy cluster for several times what it can do: nobody may fail, nothing may be done twice.

    python -m benchmarks.routers.overload [--times 3] [--lease-s 6] [--leases 10] [--prefill 1] [--decode 1]
                                          [--model smollm2]

First a closed loop finds the peak: tokens a second of whole answers while every row is busy. Then requests arrive at
`times` that rate, whether or not earlier ones are answered, for `leases` hand-off leases, so that the queue before the
decode node is much longer than a lease. The KV pool is small on purpose: memory is what everybody waits for. Requests
that the router refuses at once, because its queue is full or their deadlines can't be met, are counted apart. Exit
status 1 when a request fails, resumes, or the tokens a second fall below 90 % of the peak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.report import parser_with_json, report
from benchmarks.sse_client import Refused, Stream, stream_completion
from deploy.cluster.own_cluster import own_cluster
from shared.core.sampling_params import NEUTRAL
from tests.support.clusters.metrics_page import read_metrics, total

LEAST_SHARE = 0.9  # of the peak's tokens a second
PROMPT_TOKENS, OUTPUT_TOKENS = 192, 64
KV_BYTES = "48MiB"  # of a node: about eight such requests of the default model
USERS = 24  # of the closed loop: more than fit, so that a row that is free is taken at once
PEAK_S = 30.0
REFUSALS = ("queue_full", "deadline_unreachable", "overloaded")


@dataclass
class Tally:
    """What a phase brought: whole answers as (end, tokens), and the others by what they ended with."""

    whole: list[tuple[float, int]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def tokens_per_s(self, begin: float, end: float) -> float:
        return sum(tokens for at, tokens in self.whole if begin < at <= end) / (end - begin)


class Load:
    """Requests of one kind with fresh random prompts, so that no prefix cache makes them cheaper."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)

    async def one(self, tally: Tally) -> None:
        prompt = [self._rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
        body = {"model": "bench", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        body |= asdict(NEUTRAL) | {"temperature": 0}
        try:
            stream = await stream_completion(self._port, body)
        except Refused as refused:
            is_full = refused.code in REFUSALS
            (tally.refused if is_full else tally.failures)[refused.code or f"HTTP {refused.status}"] += 1
        else:
            self._book(stream, tally)

    def _book(self, stream: Stream, tally: Tally) -> None:
        if len(stream.token_times) == OUTPUT_TOKENS:
            tally.whole.append((stream.token_times[-1], OUTPUT_TOKENS))
        else:
            tally.failures[stream.error or f"{len(stream.token_times)} tokens"] += 1

    async def closed(self, users: int, seconds: float, tally: Tally) -> float:
        """Each user asks again as soon as it is answered. Return the tokens a second of the second half."""
        begin = time.monotonic()

        async def user() -> None:
            while time.monotonic() < begin + seconds:
                await self.one(tally)

        await asyncio.gather(*(user() for _ in range(users)))
        return tally.tokens_per_s(begin + seconds / 2, begin + seconds)

    async def open(self, rate: float, seconds: float, tally: Tally) -> tuple[float, float]:
        """Poisson arrivals; then wait for all answers. Return when arrivals began and ended."""
        begin = time.monotonic()
        tasks, due = [], begin
        while (due := due + self._rng.expovariate(rate)) < begin + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self.one(tally)))
        end = time.monotonic()
        await asyncio.gather(*tasks)
        return begin, end


def states(url: str) -> dict[str, str]:
    """Return what the router thinks of each node: an open breaker shows as "avoided"."""
    with urllib.request.urlopen(f"{url}/admin/status", timeout=10) as reply:
        return {node["node"]: node["state"] for node in json.load(reply)["nodes"]}


async def measure(url: str, args: argparse.Namespace) -> dict[str, object]:
    load = Load(int(url.rsplit(":", 1)[1]), args.seed)
    calm, busy = Tally(), Tally()
    peak = await load.closed(USERS, PEAK_S, calm)
    seconds = args.lease_s * args.leases
    begin, end = await load.open(args.times * peak / OUTPUT_TOKENS, seconds, busy)
    lease = min(args.lease_s, seconds / 2)  # the queue has to fill first
    return {
        "peak_tok_s": peak,
        "overload_tok_s": busy.tokens_per_s(begin + lease, end),
        "longest_answer_s": max(at for at, _ in busy.whole) - end,
        "whole": len(busy.whole),
        "refused": dict(busy.refused),
        "failures": dict(calm.failures + busy.failures),
        "resumed": total(read_metrics(url), "baton_resumed_total"),
        "nodes": states(url),
    }


def is_good(figures: dict[str, object]) -> bool:
    peak, busy = figures["peak_tok_s"], figures["overload_tok_s"]
    assert isinstance(peak, float) and isinstance(busy, float) and isinstance(figures["nodes"], dict)
    healthy = all(state == "ready" for state in figures["nodes"].values())
    return busy >= LEAST_SHARE * peak and not figures["failures"] and not figures["resumed"] and healthy


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--times", type=float, default=3.0, help="arrivals, in multiples of the peak")
    parser.add_argument("--lease-s", type=float, default=6.0, help="--lease-s of the nodes")
    parser.add_argument("--leases", type=float, default=10.0, help="how long requests arrive, in leases")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-bytes", default=KV_BYTES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    flags = ["--model", args.model, "--served-model-name", "bench", "--kv-bytes", args.kv_bytes]
    flags += ["--prefill", str(args.prefill), "--decode", str(args.decode), "--lease-s", str(args.lease_s)]
    with tempfile.TemporaryDirectory() as folder, own_cluster(flags, Path(folder) / "up.log") as url:
        figures = asyncio.run(measure(url, args))
    report(figures, args.json)
    return 0 if is_good(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
