"""Prompts that begin with one of many prefixes, over prefill nodes that together hold all prefixes: who finds how much.

    python -m tests.bench.prefix_zipf [--policies prefix_aware,round_robin] [--pulls off] [--nodes 4] [--prefixes 64]
                                      [--held 16] [--exponent 1.0] [--requests 1200] [--warm 300] [--token-ms 0.1]

Each node's pool holds `--held` prefixes of 1,024 tokens. Prefix number r is drawn with a weight of 1 / r ** exponent. A
policy that sends each prefix to one node lets the nodes' caches hold all prefixes. With round robin each cache holds
the same prefixes, the most frequent ones.

Hit rates are shares of the prompt tokens after the first `--warm` requests; at most 1024/1032, as a prompt's own tokens
are always computed. `hit_rate` is that of the prefill nodes. `possible` is the hit rate if all nodes together were one
cache of the `--held` prefixes of each node; `alone` is the hit rate of one node's cache.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy.cluster.own_cluster import own_cluster
from shared.kv.layout import page_bytes
from shared.model.hashlm.model import HashLM
from tests.bench.prefix_chats import CACHED, COMPUTED, PICKS, PULLS, VOCAB, by_label, by_node, sleep_for_tokens
from tests.bench.report import report
from tests.bench.sse_client import stream_completion
from tests.support.metrics_page import read_metrics

PAGE_SIZE = 16
PREFIX_TOKENS = 1024
OWN_TOKENS = 8  # of a prompt: they fill no page, so caches hold prefixes only
ANSWER_TOKENS = 4
SPARE_PAGES = 16  # for the last, partly filled pages of open requests


def drawn(rng: random.Random, args: argparse.Namespace) -> list[int]:
    """Return the prefix number of each request."""
    weights = [1 / rank**args.exponent for rank in range(1, args.prefixes + 1)]
    return rng.choices(range(args.prefixes), weights, k=args.requests)


def lru_hit_rate(numbers: Sequence[int], size: int, warm: int) -> float:
    """Return the share of prompt tokens after the first `warm` requests that one cache of `size` prefixes serves."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for number in numbers:
        hits.append(number in held)
        held[number] = None
        held.move_to_end(number)
        if len(held) > size:
            held.popitem(last=False)
    return statistics.mean(hits[warm:]) * PREFIX_TOKENS / (PREFIX_TOKENS + OWN_TOKENS)


async def send(port: int, prompts: Iterator[list[int]], ttfts: list[float], streams: int) -> None:
    """Send all prompts, `streams` at a time."""

    async def one_stream() -> None:
        for prompt in prompts:
            body = {"model": "bench", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
            stream = await stream_completion(port, {**body, "ignore_eos": True})
            assert len(stream.token_times) == ANSWER_TOKENS, stream.error
            ttfts.append(stream.ttft)

    await asyncio.gather(*(one_stream() for _ in range(streams)))


def measure(policy: str, pulls: str, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    prefixes = [rng.choices(VOCAB, k=PREFIX_TOKENS) for _ in range(args.prefixes)]
    numbers = drawn(rng, args)
    prompts = [prefixes[number] + rng.choices(VOCAB, k=OWN_TOKENS) for number in numbers]
    num_pages = args.held * PREFIX_TOKENS // PAGE_SIZE + SPARE_PAGES
    flags = ["--model", "hashlm", "--served-model-name", "bench", "--policy", policy, "--prefill", str(args.nodes)]
    flags += ["--pull-prefixes", pulls, "--local-prefill-tokens", "0", "--page-size", str(PAGE_SIZE)]
    flags += ["--kv-bytes", str(num_pages * page_bytes(HashLM().kv_planes(PAGE_SIZE)))]
    ttfts: list[float] = []
    with tempfile.TemporaryDirectory() as folder, own_cluster(flags, Path(folder) / "log.txt") as url:
        port = int(url.rsplit(":", 1)[1])
        asyncio.run(send(port, iter(prompts[: args.warm]), [], args.streams))
        before = read_metrics(url)
        asyncio.run(send(port, iter(prompts[args.warm :]), ttfts, args.streams))
        after = read_metrics(url)
    cached, computed = (added(by_node(before, name), by_node(after, name)) for name in (CACHED, COMPUTED))
    total = [cached[node] + computed[node] for node in computed]
    return {
        "policy": policy,
        "pulls": pulls,
        "hit_rate": sum(cached.values()) / sum(total),
        "possible": lru_hit_rate(numbers, args.held * args.nodes, args.warm),
        "alone": lru_hit_rate(numbers, args.held, args.warm),
        "computed": sum(computed.values()),
        "busiest_of_mean": max(total) / statistics.mean(total),
        "ttft_p50_ms": 1000 * statistics.median(ttfts),
        "ttft_p90_ms": 1000 * statistics.quantiles(ttfts, n=10)[8],
        "picks": by_label(after, PICKS, "reason", 'role="prefill"'),
        "outcomes": by_label(after, PULLS, "outcome"),
    }


def added(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return by how much a counter of each prefill node grew."""
    return {node: value - before.get(node, 0.0) for node, value in after.items() if node.startswith("prefill")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="prefix_aware,round_robin")
    parser.add_argument("--pulls", default="off", help="on, off or both")
    parser.add_argument("--nodes", type=int, default=4, help="number of prefill nodes")
    parser.add_argument("--prefixes", type=int, default=64)
    parser.add_argument("--held", type=int, default=16, help="prefixes that one node's KV pool holds")
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--warm", type=int, default=300, help="requests that are sent before the count begins")
    parser.add_argument("--streams", type=int, default=8, help="requests that are open at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--token-ms", type=float, default=0.1, help="how long a device sleeps for each token")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    args = parser.parse_args()
    sleep_for_tokens(args.token_ms)
    rows = [measure(*cell, args) for cell in itertools.product(args.policies.split(","), args.pulls.split(","))]
    report({"rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
