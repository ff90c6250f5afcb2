"""Where the time to one request's first token goes: on a node alone, and from a prefill to a decode node.

    python -m tests.bench.first_token [--requests 20] [--prompts 30 128 512] [--empty-cache] [--json F]

One request at a time, nothing else runs; prompts that nobody has cached, as chat messages, so that the template counts.
Medians in ms of each part, and of the whole as the client sees it; `first` and `worst` are of the whole, with the very
first requests, which the medians leave out. --empty-cache: no kernel was compiled before. The parts follow one another:

    client   arrive
    router   parse | template | tokenize | dispatch
    node     to node | plan | compute | sample | result
    router   to router | write
    client   read

`dispatch`: all else the router does before it sends. `plan`: until the step runs on its stream. `result`: from the
sampled token to the message with it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.cluster.local import child_specs, deal_routers
from shared.config import core_plan
from shared.config.load import load
from shared.config.processes import ClusterConfig
from shared.config.router_settings import UNMEASURED_LOCAL_TOKENS
from shared.core.sampling_params import NEUTRAL
from tests.bench.cluster import READY_TIMEOUT_S, free_port
from tests.bench.report import report

LAYOUTS = {"alone": {"prefill": 0, "decode": 1}, "pair": {"prefill": 1, "decode": 1}}
WORDS = ("stone", "river", "lamp", "seven", "green", "window", "paper", "quiet", "road", "music", "winter", "glass")
TEMPLATE_TOKENS = 10  # about what the template adds
PAUSE_S = 0.02
WARM_REQUESTS = 3
Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Seen:
    """By the client, on the monotonic clock."""

    sent: float
    first: float
    prompt_tokens: int


class Site:
    """Processes with marks. `files` by process name."""

    def __init__(
        self, folder: Path, layout: dict[str, int], flags: dict[str, dict[str, Any]], *, empty_cache: bool
    ) -> None:
        self.port, node_port = free_port(), free_port()
        own = {"port": self.port, "node_endpoint": f"tcp://127.0.0.1:{node_port}"}
        given = {**flags, "router": {**flags.get("router", {}), **own}, "local": layout}
        config = load(ClusterConfig, given)
        specs = child_specs(config, deal_routers(config), core_plan.usable_cores(), os.getpid())
        self.files = {spec.name: folder / f"{spec.name}.marks" for spec in specs}
        self._more_env = {"NUMBA_CACHE_DIR": str(folder / "kernels")} if empty_cache else {}
        self._log = (folder / "log").open("wb")
        self.node = next(spec.name for spec in specs if spec.name != "router")  # the one that computes prompts
        self._children = [self._start(spec.name, spec.argv) for spec in specs]

    def _start(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        words = argv[argv.index("deploy.cli") + 1 :]
        cpus = next((word.partition("=")[2].split(",") for word in words if word.startswith("--cpus=")), [])
        threads = next(int(word.partition("=")[2]) for word in words if word.startswith("--threads="))
        plan = core_plan.CorePlan(threads=threads, cpus=tuple(map(int, cpus)))
        env = os.environ | core_plan.environment(plan) | self._more_env  # the marks load torch before `baton` sets it
        command = [sys.executable, "-m", "tests.bench.first_token_marks", str(self.files[name]), *words]
        return subprocess.Popen(command, env=env, stdout=self._log, stderr=subprocess.STDOUT)

    def wait_ready(self, pair: bool) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and all(child.poll() is None for child in self._children):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready") as reply:
                if not pair or json.load(reply)["pair"]:
                    return
            time.sleep(0.2)
        raise RuntimeError(Path(self._log.name).read_text()[-4000:])

    def close(self) -> None:
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(30)
            child.kill()
            child.wait()
        self._log.close()

    def times(self) -> dict[str, Times]:
        """All marks so far: process -> name -> ascending times."""
        return {name: read_marks(path) for name, path in self.files.items()}


def read_marks(path: Path) -> Times:
    times: Times = defaultdict(list)
    for line in path.read_text().splitlines():
        name, at = line.split()
        times[name].append(float(at))
    return times


@contextlib.contextmanager
def serving(layout: str, flags: dict[str, dict[str, Any]], *, empty_cache: bool = False) -> Iterator[Site]:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), LAYOUTS[layout], flags, empty_cache=empty_cache)
        try:
            site.wait_ready(layout == "pair")
            yield site
        finally:
            site.close()


def ask(port: int, text: str) -> Seen:
    """One streamed chat request; the first event with text counts."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_TIMEOUT_S)
    client.connect()
    body = {
        "model": "bench",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 2,
        **asdict(NEUTRAL),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    payload = json.dumps(body)
    sent = time.monotonic()
    client.request("POST", "/v1/chat/completions", payload, {"Content-Type": "application/json"})
    reply, first, tokens = client.getresponse(), 0.0, 0
    while line := reply.readline():
        now = time.monotonic()
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if not first and any(choice.get("token_ids") for choice in event.get("choices", ())):
                first = now
            tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
    client.close()
    assert reply.status == 200 and first, reply.status
    return Seen(sent, first, tokens)


def parts_of(seen: Seen, router: Times, node: Times) -> dict[str, float]:
    """Seconds of each part. The parts add up to the whole, but for the client's own connect."""

    def within(times: Times, name: str) -> list[float]:
        all_of = times.get(name, [])
        return all_of[bisect_left(all_of, seen.sent) : bisect_left(all_of, seen.first)]

    def spent(name: str) -> float:
        ends = within(router, f"{name}>")
        return sum(ends) - sum(within(router, f"{name}<")[: len(ends)])

    body, asked = within(router, "body>")[0], within(router, "router_sends.Generate<")[0]
    heard, told = within(node, "node_hears<")[0], within(node, "node_sends.Tokens<")[0]
    begun = within(node, "forward<")[0]
    drawn = [at for at in within(node, "sample>") if at <= told][-1]
    drawing = [at for at in within(node, "sample<") if at <= told][-1]
    back = within(router, "router_hears.Tokens<")[0]
    written = [at for at in within(router, "write<") if at >= back][0]
    router_parts = {name: spent(name) for name in ("parse", "template", "tokenize")}
    return {
        "arrive": body - seen.sent,
        **router_parts,
        "dispatch": asked - body - sum(router_parts.values()),
        "to node": heard - asked,
        "plan": begun - heard,
        "compute": drawing - begun,
        "sample": drawn - drawing,
        "result": told - drawn,
        "to router": back - told,
        "write": written - back,
        "read": seen.first - written,
        "whole": seen.first - seen.sent,
    }


def prompt(rng: random.Random, num_tokens: int) -> str:
    """About so many tokens, most words being one; the beginning is another each time, so nothing is cached."""
    words = [str(rng.randrange(10))] + [rng.choice(WORDS) for _ in range(max(1, num_tokens - TEMPLATE_TOKENS))]
    return " ".join(words)


def measure(site: Site, num_requests: int, num_tokens: int, rng: random.Random) -> dict[str, float]:
    seen = []
    for _ in range(WARM_REQUESTS + num_requests):
        seen.append(ask(site.port, prompt(rng, num_tokens)))
        time.sleep(PAUSE_S)
    wholes, warm = [one.first - one.sent for one in seen], seen[WARM_REQUESTS:]
    times = site.times()
    rows = [parts_of(one, times["router"], times[site.node]) for one in warm]
    medians = {part: statistics.median(row[part] for row in rows) for part in rows[0]}
    figures = medians | {"first": wholes[0], "worst": max(wholes)}
    in_ms = {f"{part}_ms": round(1e3 * seconds, 2) for part, seconds in figures.items()}
    return {"prompt_tokens": statistics.median(one.prompt_tokens for one in warm), **in_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prompts", type=int, nargs="+", default=[30, 128, 512])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--model", default="smollm2")
    known = UNMEASURED_LOCAL_TOKENS
    parser.add_argument("--local-prefill-tokens", type=int, default=known, help="of the router (default: %(default)s)")
    parser.add_argument("--empty-cache", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags: dict[str, dict[str, Any]] = {"model": {"model": args.model, "served_model_name": ("bench",)}}
    flags["router"] = {"local_prefill_tokens": args.local_prefill_tokens}  # a constant: it says on which node to look
    figures = {}
    for layout in args.layouts:
        with serving(layout, flags, empty_cache=args.empty_cache) as site:
            for num_tokens in args.prompts:
                rng = random.Random(num_tokens)
                figures[f"{layout}, {num_tokens}"] = measure(site, args.requests, num_tokens, rng)
    report(figures, args.json)


if __name__ == "__main__":
    main()
