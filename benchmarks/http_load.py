"""Through HTTP: total tokens/s, TTFT and ITL at 1, 8 and 32 streams; and the ITL of running streams while long
prompts arrive.

    python -m benchmarks.http_load [--dtype bfloat16] [--transport shm]
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import urllib.request
from typing import Any

from benchmarks.cluster import baton_up
from benchmarks.report import parser_with_json, report
from benchmarks.sse_client import Stream, percentile, stream_completion
from shared.config.settings.router_settings import UNMEASURED_LOCAL_TOKENS

LONG_PROMPT = 1500
HANDOFFS = 16  # one after another: a hand-off beside running streams waits for the steps in flight too


def body(rng: random.Random, prompt_tokens: int, num_out: int) -> dict[str, object]:
    return {
        "model": "bench",
        "prompt": [rng.randrange(100, 40_000) for _ in range(prompt_tokens)],
        "max_tokens": num_out,
        "temperature": 0,
        "ignore_eos": True,
    }


async def steady(port: int, streams: int, prompt_tokens: int, num_out: int, rng: random.Random) -> dict[str, float]:
    """All at once. The rate counts tokens between the last first token and the first finish, when all decode."""
    done: list[Stream] = await asyncio.gather(
        *(stream_completion(port, body(rng, prompt_tokens, num_out)) for _ in range(streams))
    )
    begin = max(stream.token_times[0] for stream in done)
    end = min(stream.token_times[-1] for stream in done)
    counted = sum(begin < at <= end for stream in done for at in stream.token_times)
    wall = max(stream.token_times[-1] for stream in done) - min(stream.sent for stream in done)
    itls = [itl for stream in done for itl in stream.itls]
    return {
        "tok_s": sum(len(stream.token_times) for stream in done) / wall,
        "steady_tok_s": counted / (end - begin),
        "ttft_p50_ms": 1e3 * percentile([stream.ttft for stream in done], 0.5),
        "ttft_p99_ms": 1e3 * percentile([stream.ttft for stream in done], 0.99),
        "itl_p50_ms": 1e3 * percentile(itls, 0.5),
        "itl_p99_ms": 1e3 * percentile(itls, 0.99),
    }


async def interference(port: int, rng: random.Random, prompts: int = 8) -> dict[str, float]:
    """4 streams decode; then prompts of 1,500 tokens arrive one after another."""
    runners = [asyncio.create_task(stream_completion(port, body(rng, 64, 500))) for _ in range(4)]
    await asyncio.sleep(3.0)
    begin = asyncio.get_running_loop().time()
    times = []
    for _ in range(prompts):
        long = await stream_completion(port, body(rng, LONG_PROMPT, 2))
        times.append(long.ttft)
    end = asyncio.get_running_loop().time()
    done = await asyncio.gather(*runners)
    during, quiet = [], []
    for stream in done:
        for earlier, later in zip(stream.token_times, stream.token_times[1:], strict=False):
            (during if begin <= later <= end else quiet).append(later - earlier)
    return {
        "quiet_itl_p50_ms": 1e3 * percentile(quiet, 0.5),
        "quiet_itl_p99_ms": 1e3 * percentile(quiet, 0.99),
        "during_itl_p50_ms": 1e3 * percentile(during, 0.5),
        "during_itl_p99_ms": 1e3 * percentile(during, 0.99),
        "long_prompt_ttft_s": percentile(times, 0.5),
        "samples": float(len(during)),
    }


async def measure(port: int) -> dict[str, Any]:
    rng = random.Random(11)
    figures: dict[str, Any] = {}
    await steady(port, 4, 128, 16, rng)
    for _ in range(HANDOFFS):
        await stream_completion(port, body(rng, 512, 4))
    await asyncio.sleep(1.0)  # heartbeats bring the nodes' histograms
    figures["handoff_p50_ms"] = 1e3 * handoff_median(port)
    for streams, num_out in ((1, 128), (8, 512), (32, 192)):
        figures[f"streams_{streams}"] = await steady(port, streams, 128, num_out, rng)
    figures["interference"] = await interference(port, rng)
    figures["handoff_beside_load_p50_ms"] = 1e3 * handoff_median(port)
    return figures


def handoff_median(port: int) -> float:
    """Seconds from the last processed chunk to Installed, out of the router's histogram, interpolated."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found = re.findall(r'^baton_handoff_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)$', text, re.MULTILINE)
    buckets = [(float(bound), float(count)) for bound, count in found]
    half, below, counted = max(count for _, count in buckets) / 2, 0.0, 0.0
    for bound, count in buckets:
        if count >= half:
            return below + (bound - below) * (half - counted) / (count - counted)
        below, counted = bound, count
    return below


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--transport", default="auto", choices=("auto", "shm", "zmq"))
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    flags = ["--model", args.model, "--served-model-name", "bench"]
    flags += ["--dtype", args.dtype, "--transport", args.transport]
    flags += ["--local-prefill-tokens", str(UNMEASURED_LOCAL_TOKENS)]  # by cost, an idle decode node takes the prompts
    with baton_up(*flags) as port:
        report(asyncio.run(measure(port)), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
