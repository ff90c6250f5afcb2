"""Chats of several turns over more and more prefill nodes: prompt tokens really computed, and how evenly.

    python -m tests.bench.prefix_chats [--nodes 1,2,4] [--policies prefix_aware,least_load] [--chats 24] [--turns 6]
                                       [--pulls on,off] [--token-ms 1] [--seeds 1,2,3]

Each chat sends its whole history again, its answers included, as chat clients do. With a router that knows what nodes
have cached, more nodes compute no more tokens than one. Tokens of decode nodes count too: a short rest of a prompt may
be computed there. HashLM has no weights, so seconds say nothing here, unless its device sleeps for each token: then
nodes also pull prefixes from each other, which they do not where computing takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from deploy.cluster.own_cluster import own_cluster
from tests.bench.report import report
from tests.bench.sse_client import stream_completion
from tests.support.metrics_page import NODE, Metrics, read_metrics

COMPUTED, CACHED = "baton_prompt_tokens_total", "baton_cached_prompt_tokens_total"
PULLED, PULLS = "baton_pulled_prefix_tokens_total", "baton_prefix_pulls_total"
PICKS, SOURCES = "baton_picks_total", "baton_prefix_sources_total"
ROOT = Path(__file__).resolve().parents[2]
FIRST_TOKENS, NEXT_TOKENS, ANSWER_TOKENS = 160, 64, 48
VOCAB = range(95)  # of HashLM, without its end


async def chat(port: int, rng: random.Random, turns: int, ttfts: list[float]) -> int:
    """Return the tokens of its prompts, one after another."""
    history = rng.choices(VOCAB, k=FIRST_TOKENS)
    asked = 0
    for _ in range(turns):
        answer: list[int] = []

        def keep(event: dict[str, Any], answer: list[int] = answer) -> int:
            ids = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
            answer.extend(ids)
            return len(ids)

        body = {"model": "bench", "prompt": history, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        stream = await stream_completion(port, body, keep)
        assert len(answer) == ANSWER_TOKENS, stream.error
        ttfts.append(stream.ttft)
        asked += len(history)
        history = history + answer + rng.choices(VOCAB, k=NEXT_TOKENS)
    return asked


async def chats(port: int, count: int, turns: int, seed: int) -> tuple[int, list[float], float]:
    """Return the tokens of all prompts, each turn's TTFT, and the seconds that all chats took."""
    ttfts: list[float] = []
    began = time.monotonic()
    asked = await asyncio.gather(*(chat(port, random.Random(1000 * seed + n), turns, ttfts) for n in range(count)))
    return sum(asked), ttfts, time.monotonic() - began


def by_node(metrics: Metrics, name: str) -> dict[str, float]:
    """Return a counter's value of each node."""
    found: dict[str, float] = defaultdict(float)
    for (metric, labels), value in metrics.items():
        if metric == name and (node := NODE.search(labels)):
            found[node[1]] += value
    return found


def by_label(metrics: Metrics, name: str, label: str, having: str = "") -> str:
    """Return a counter's values by one of its labels, of all nodes together."""
    counts: Counter[str] = Counter()
    for (metric, labels), value in metrics.items():
        if metric == name and having in labels and value:
            counts[labels.partition(f'{label}="')[2].partition('"')[0]] += int(value)
    return " ".join(f"{of}={count}" for of, count in sorted(counts.items()))


def measure(policy: str, nodes: int, pulls: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    flags = ["--model", "hashlm", "--served-model-name", "bench", "--policy", policy, "--prefill", str(nodes)]
    flags += ["--pull-prefixes", pulls, *(("--chunk-size", str(args.chunk_size)) if args.chunk_size else ())]
    with tempfile.TemporaryDirectory() as folder, own_cluster(flags, Path(folder) / "log.txt") as url:
        port = int(url.rsplit(":", 1)[1])
        asked, ttfts, took_s = asyncio.run(chats(port, args.chats, args.turns, seed))
        metrics = read_metrics(url)
    computed, cached, pulled = (by_node(metrics, name) for name in (COMPUTED, CACHED, PULLED))
    prefills = [value for node, value in computed.items() if node.startswith("prefill")]
    return {
        "policy": policy,
        "pulls": pulls,
        "prefill_nodes": nodes,
        "seed": seed,
        "prompt_tokens": asked,
        "computed": sum(computed.values()),
        "on_prefill_nodes": sum(prefills),
        "cached": sum(cached.values()),
        "pulled": sum(pulled.values()),
        "busiest_of_mean": max(prefills) / (sum(prefills) / nodes) if sum(prefills) else 0.0,
        "ttft_p50_ms": 1000 * statistics.median(ttfts),
        "ttft_p90_ms": 1000 * statistics.quantiles(ttfts, n=10)[8],
        "chats_per_s": args.chats / took_s,
        "picks": by_label(metrics, PICKS, "reason", 'role="prefill"'),
        "sources": by_label(metrics, SOURCES, "outcome"),
        "outcomes": by_label(metrics, PULLS, "outcome"),
    }


def sleep_for_tokens(token_ms: float) -> None:
    """Let the devices of nodes that start from now on sleep for each token, unless `token_ms` is 0."""
    if token_ms:
        sleepy = {"SLEEPY_STEP_S": "0.002", "SLEEPY_TOKEN_S": str(token_ms / 1000)}
        os.environ.update(sleepy, PYTHONPATH=str(ROOT / "tests/support/sleepy"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,2,4", help="numbers of prefill nodes")
    parser.add_argument("--policies", default="prefix_aware,least_load")
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--pulls", default="on", help="on, off or both")
    parser.add_argument("--token-ms", type=float, default=0.0, help="how long a device sleeps for each token")
    parser.add_argument("--chunk-size", type=int, default=0, help="of prefill nodes; 0: theirs")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    args = parser.parse_args()
    sleep_for_tokens(args.token_ms)
    nodes, seeds = ([int(number) for number in text.split(",")] for text in (args.nodes, args.seeds))
    cells = itertools.product(args.policies.split(","), nodes, args.pulls.split(","), seeds)
    rows = [measure(*cell, args) for cell in cells]
    report({"rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
