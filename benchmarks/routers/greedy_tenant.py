"""Measure what a greedy tenant costs two steady tenants: their goodput and TTFT with and without it.

    python -m benchmarks.routers.greedy_tenant [--times 5] [--steady 0.8] [--seconds 40] [--limit]

The cluster is real: a router with a keys file, a prefill node and a decode node. HashLM runs on a device that sleeps
(tests/support/sleepy), so that two cores can show it. A closed loop finds the peak first; a third of it is a tenant's
share. B and C then ask for `--steady` times their share, alone, and again while A asks for `--times` its share. With
`--limit` there is a third run, in which the keys file limits A to its share, once A has spent the minute's tokens that
it may take at once. Goodput counts the tokens of B's and C's whole answers that began within TTFT_S. Exit status 1 when
it falls by more than a tenth because of A.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import parser_with_json, report
from benchmarks.sse_client import Refused, percentile, stream_completion
from deploy.cluster.own_cluster import own_cluster
from router.tenants.keys_file import hash_of
from tests.support.clusters.key_folders import write_key

ROOT = Path(__file__).resolve().parents[2]
LEAST_SHARE = 0.9  # of the goodput without the greedy tenant
TTFT_S = 2.0
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 32
VOCAB = range(95)  # of HashLM, without its end
ROWS = 8
USERS = 16  # of the closed loop
PEAK_S = 12.0
BEGIN_S = 5.0  # of each run, before its measurement begins
SPENT_S = 20.0  # the same with a limit: A has used the minute's tokens that it may take at once
SLEEPY = {"SLEEPY_STEP_S": "0.020", "SLEEPY_TOKEN_S": "0.001"}
FULL = (429, 503)
STEADY = ("b", "c")
TENANTS = ("a", *STEADY)


@dataclass
class Tally:
    """One tenant's requests. `answers`: of each whole answer when it was sent, its TTFT, and when it ended."""

    answers: list[tuple[float, float, float]] = field(default_factory=list)
    num_refused: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def figures(self, begin: float, end: float) -> dict[str, Any]:
        """Return figures of this time: TTFTs by when requests were sent, goodput by when answers ended."""
        ttfts = [ttft for sent, ttft, _ in self.answers if begin <= sent < end]
        good = [ttft for _, ttft, at in self.answers if begin <= at < end and ttft <= TTFT_S]
        return {
            "goodput_tok_s": round(len(good) * OUTPUT_TOKENS / (end - begin), 1),
            "ttft_p50_ms": round(1e3 * statistics.median(ttfts), 1) if ttfts else None,
            "ttft_p99_ms": round(1e3 * percentile(ttfts, 0.99), 1) if ttfts else None,
            "whole": len(self.answers),
            "refused": self.num_refused,
            "failures": dict(self.failures),
        }


class Tenant:
    """Sends requests of one size with fresh random prompts, with the tenant's key."""

    def __init__(self, name: str, port: int, seed: int) -> None:
        self._key, self._port = key_of(name), port
        self._rng = random.Random(f"{name} {seed}")
        self.tally = Tally()

    async def one(self) -> None:
        prompt = self._rng.choices(VOCAB, k=PROMPT_TOKENS)
        body = {"model": "bench", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        try:
            stream = await stream_completion(self._port, body, key=self._key)
        except Refused as refused:
            if refused.status in FULL:
                self.tally.num_refused += 1
            else:
                self.tally.failures[f"HTTP {refused.status}"] += 1
            return
        if len(stream.token_times) == OUTPUT_TOKENS:
            self.tally.answers.append((stream.sent, stream.ttft, stream.token_times[-1]))
        else:
            self.tally.failures[stream.error or f"{len(stream.token_times)} tokens"] += 1

    async def closed(self, until: float) -> None:
        while time.monotonic() < until:
            await self.one()

    async def open(self, rate: float, until: float, *, is_steady: bool) -> None:
        """Send requests as a Poisson process. Then wait for the answers of a steady tenant, and hang up for another."""
        tasks, due = [], time.monotonic()
        while (due := due + self._rng.expovariate(rate)) < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self.one()))
        for task in tasks if not is_steady else ():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=not is_steady)


def key_of(name: str) -> str:
    return f"{name}-key"


def keys_file(folder: Path, limited: dict[str, int]) -> Path:
    """Write a keys file. `limited`: tokens a minute of tenants that have a limit."""
    lines = []
    for name in TENANTS:
        lines += [f"[tenants.{name}]", f'keys = ["{hash_of(key_of(name))}"]', "sees_cluster = true"]
        lines += [f"tokens_per_minute = {limited[name]}"] if name in limited else []
    write_key(folder / "keys", "\n".join(lines) + "\n")
    return folder / "keys"


async def peak_of(port: int, seed: int) -> float:
    """Return the tokens a second of whole answers in the second half of a closed loop."""
    probe, begin = Tenant("b", port, seed), time.monotonic()
    await asyncio.gather(*(probe.closed(begin + PEAK_S) for _ in range(USERS)))
    ends = [at for _, _, at in probe.tally.answers if begin + PEAK_S / 2 <= at < begin + PEAK_S]
    return len(ends) * OUTPUT_TOKENS / (PEAK_S / 2)


async def loaded(port: int, rates: dict[str, float], args: argparse.Namespace, begin_s: float) -> dict[str, Any]:
    """Return the figures of each tenant, and of B and C together."""
    tenants = {name: Tenant(name, port, args.seed + 1) for name in rates}
    begin, until = time.monotonic() + begin_s, time.monotonic() + begin_s + args.seconds
    loads = (tenants[name].open(rate, until, is_steady=name in STEADY) for name, rate in rates.items())
    await asyncio.gather(*loads)
    found: dict[str, Any] = {name: tenant.tally.figures(begin, until) for name, tenant in tenants.items()}
    both = Tally([answer for name in STEADY for answer in tenants[name].tally.answers])
    return found | {"steady": both.figures(begin, until)}


async def measure(url: str, limit: Path | None, args: argparse.Namespace) -> dict[str, Any]:
    port = int(url.rsplit(":", 1)[1])
    peak = args.peak or await peak_of(port, args.seed)
    share = peak / OUTPUT_TOKENS / len(TENANTS)
    steady = dict.fromkeys(STEADY, args.steady * share)
    greedy = {**steady, "a": args.times * share}
    found: dict[str, Any] = {"peak_tok_s": round(peak, 1)}
    found["alone"] = await loaded(port, steady, args, BEGIN_S)
    found["greedy"] = await loaded(port, greedy, args, BEGIN_S)
    if limit is not None:
        per_minute = 60 * share * (PROMPT_TOKENS + OUTPUT_TOKENS)
        keys_file(limit.parent, {"a": int(per_minute)})
        await asyncio.sleep(BEGIN_S)  # the router reads the file twice a second
        found["limited"] = await loaded(port, greedy, args, SPENT_S)
    for name in ("greedy", "limited")[: 1 + (limit is not None)]:
        found[f"{name}_of_alone"] = {
            figure: round(found[name]["steady"][figure] / found["alone"]["steady"][figure], 3)
            for figure in ("goodput_tok_s", "ttft_p50_ms")
        }
    return found


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--times", type=float, default=5.0, help="the greedy tenant's requests, in shares")
    parser.add_argument("--steady", type=float, default=0.8, help="requests of each of the others, in shares")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run")
    parser.add_argument("--peak", type=float, default=0.0, help="tokens a second; 0: as a closed loop finds it")
    parser.add_argument("--limit", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ.update(SLEEPY, PYTHONPATH=str(ROOT / "tests/support/sleepy"))
    with tempfile.TemporaryDirectory() as folder:
        keys = keys_file(Path(folder), {})
        flags = ["--model", "hashlm", "--served-model-name", "bench", "--max-running", str(ROWS)]
        flags += ["--api-key-file", str(keys)]
        with own_cluster(flags, Path(folder) / "up.log", key_of("b")) as url:
            figures = asyncio.run(measure(url, keys if args.limit else None, args))
    report(figures, args.json)
    return 0 if figures["greedy_of_alone"]["goodput_tok_s"] >= LEAST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
