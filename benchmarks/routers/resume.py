"""Kills one of two decode nodes under many streams: how soon that is noticed, how long streams pause, what they say.

    python -m benchmarks.routers.resume [--model smollm2] [--dtype float32] [--streams 32] [--tokens 96]

Half of the streams are greedy, half sampled with seeds; each is compared with its own run without the kill. Prompts
have some 120 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.sse_client import percentile
from deploy.cluster.own_cluster import own_cluster
from shared.core.sampling_params import NEUTRAL

POLL_S = 0.01
TIMEOUT_S = 600.0
VICTIM = "decode-1"
TEXT = "The keeper of the northern tower wrote one line a day into a book. On day {} the line was: "


@dataclass
class Stream:
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""

    def pause_after(self, at: float) -> float:
        """The longest gap between tokens that has its end after `at`; 0 for a stream that was over."""
        gaps = [(b - a) for a, b in zip(self.times, self.times[1:], strict=False) if b > at]
        return max(gaps, default=0.0)


async def one(http: httpx.AsyncClient, number: int, args: argparse.Namespace, stream: Stream) -> None:
    sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
    body = {"model": "bench", "prompt": 5 * TEXT.format(number), "max_tokens": args.tokens, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True, **asdict(NEUTRAL), **sampled}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                stream.error = str(event["error"]["message"])
                return
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    stream.ids += choice["token_ids"]
                    stream.times.append(time.monotonic())


async def all_streams(base: str, args: argparse.Namespace, *, kill: bool) -> tuple[list[Stream], float, float]:
    """(streams, when the node was killed, when the router had noticed)."""
    streams = [Stream() for _ in range(args.streams)]
    killed = noticed = 0.0
    async with httpx.AsyncClient(base_url=base, timeout=TIMEOUT_S) as http:
        tasks = [asyncio.create_task(one(http, number, args, stream)) for number, stream in enumerate(streams)]
        if kill:
            while min(len(stream.ids) for stream in streams) < args.tokens // 4:
                await asyncio.sleep(POLL_S)
            killed = time.monotonic()
            os.kill(pid_of(VICTIM), signal.SIGKILL)
            noticed = await asyncio.to_thread(wait_noticed, base)
        await asyncio.gather(*tasks)
    return streams, killed, noticed


def pid_of(name: str) -> int:
    for process in psutil.Process().children(recursive=True):
        if f"--node-id={name}" in process.cmdline():
            return int(process.pid)
    raise RuntimeError(f"no process {name}")


def wait_noticed(base: str) -> float:
    """When the router no longer counts on the node."""
    while True:
        with urllib.request.urlopen(base + "/ready", timeout=10) as reply:
            if VICTIM not in [node["node"] for node in json.load(reply)["nodes"] if node["ready"]]:
                return time.monotonic()
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    flags = ["--prefill", "1", "--decode", "2", "--served-model-name", "bench"]
    flags += ["--model", args.model, "--dtype", args.dtype]
    with tempfile.TemporaryDirectory() as folder, own_cluster(flags, Path(folder) / "up.log") as base:
        whole, _, _ = asyncio.run(all_streams(base, args, kill=False))
        broken, killed, noticed = asyncio.run(all_streams(base, args, kill=True))
    pauses = [stream.pause_after(killed) for stream in broken]
    usual = percentile([b - a for s in whole for a, b in zip(s.times, s.times[1:], strict=False)], 0.5)
    equal = sum(a.ids == b.ids and not b.error for a, b in zip(whole, broken, strict=True))
    moved = [pause for pause in pauses if pause > 3 * usual]
    print(f"equal to the unbroken run: {equal} of {args.streams}; errors: {sum(bool(s.error) for s in broken)}")
    print(f"death noticed after {1e3 * (noticed - killed):.0f} ms")
    print(f"longest pause of a stream: median {percentile(pauses, 0.5):.2f} s, worst {max(pauses):.2f} s")
    print(
        f"of {len(moved)} streams that paused: median {percentile(moved or [0.0], 0.5):.2f} s; usual gap {usual:.3f} s"
    )


if __name__ == "__main__":
    main()
