"""Measure a router's cost for each event that it streams, beside smg, a router in Rust for SGLang and vLLM.

    python -m benchmarks.routers.beside_smg [--seconds 20] [--loads 64:2000,1000:4000] [--modes regular,pd] [--vllm]

Each router is a process, its nodes are another one, and the clients a third. The clients hold `streams` chats open, at
`tokens per second` in total, each with answers of `--max-tokens`, one after another. Behind smg are mock HTTP servers
that stream one event per token (benchmarks.routers.paced_workers): smg passes their events on, and makes no text.
Behind Baton's router are nodes that send token ids over ZeroMQ (benchmarks.paced_nodes): it applies the chat template,
tokenizes, keeps a journal, and makes text and events. So the two do different work for the same clients. With `pd`
there are servers for prefill too: smg sends each request to a server of both kinds. The first run installs smg into
build/peers.

With `--vllm`, a real server of vLLM stands behind smg, so that both sides do the same work: smg and vLLM's API server
together apply the template, tokenize, and make text and events. The CPU time of vLLM's engine does not count. The
engine sets the rate of the events, and Baton's router is then measured at this rate.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.environments import smg, vllm
from benchmarks.peers.servers import MODEL as BENCH_MODEL
from benchmarks.peers.servers import Room, vllm_server
from benchmarks.peers.weights import hf_folder
from benchmarks.report import parser_with_json, report
from benchmarks.routers.open_streams import BEFORE_S, Child, running, usage, wait_for_nodes
from deploy.cluster.own_cluster import HOST
from deploy.cluster.ports import free_port
from shared.wire.descriptors import raise_limit
from tests.support.clusters.router_process import RouterProcess
from tests.support.web.mock_openai import MODEL

NUM_DECODE = 2
MODES = {"regular": 0, "pd": 2}  # the number of prefill nodes
SMG_FLAGS = ("--policy", "round_robin", "--disable-tokenizer-autoload", "--log-level", "warn")
START_S, ANSWER_S = 60.0, 5.0
PER_S = 200.0  # streams that are opened in a second


class Load:
    def __init__(self, text: str) -> None:
        """`text`: STREAMS:TOKENS_PER_S"""
        streams, _, rate = text.partition(":")
        self.streams, self.tokens_per_s = int(streams), float(rate)

    @property
    def itl_s(self) -> float:
        return self.streams / self.tokens_per_s


def check_streams(counts: dict[str, Any], num_streams: int) -> None:
    """Raise RuntimeError unless each stream has begun and each answer has the status 200."""
    if counts["begun"] != num_streams or set(counts["statuses"]) != {"200"}:
        raise RuntimeError(f"{counts['begun']} of {num_streams} streams began; statuses: {counts['statuses']}")


def watch(
    spent: Callable[[], tuple[float, int]], port: int, load: Load, args: argparse.Namespace, model: str = MODEL
) -> dict[str, Any]:
    """Return the figures of a router under a load. `spent`: returns its CPU seconds and resident bytes."""
    _, idle_bytes = spent()
    words = [str(port), "--streams", str(load.streams), "--per-s", str(PER_S), "--chat", "--again", "--model", model]
    words += ["--max-tokens", str(args.max_tokens), "--prompt-tokens", str(args.prompt_words)]
    with running(Child("benchmarks.routers.stream_clients", *words)) as clients:
        check_streams(clients.read(), load.streams)
        time.sleep(BEFORE_S)
        before, (cpu_begin, _) = clients.ask(), spent()
        time.sleep(args.seconds)
        after, (cpu_end, full_bytes) = clients.ask(), spent()
    check_streams(after, load.streams)
    seconds, events = after["at"] - before["at"], after["events"] - before["events"]
    return {
        "events_per_s": round(events / seconds, 1),
        "answers": after["whole"] - before["whole"],
        "lost": after["lost"],
        "statuses": after["statuses"],
        "cpu_share": round((cpu_end - cpu_begin) / seconds, 3),
        "cpu_us_per_event": round(1e6 * (cpu_end - cpu_begin) / events, 1),
        "idle_mb": round(idle_bytes / 1e6, 1),
        "kb_per_stream": round((full_bytes - idle_bytes) / 1e3 / load.streams, 1),
    }


def measure_baton(load: Load, num_prefill: int, args: argparse.Namespace) -> dict[str, Any]:
    room = str(load.streams + 1000)
    flags = ["--served-model-name", MODEL, "--max-connections", room, "--max-open-requests", room]
    router = RouterProcess(*flags, "--max-queued-requests", room, model=args.model)
    try:
        paced = [router.nodes, "--tokens-per-s", str(load.tokens_per_s), "--streams", str(load.streams)]
        nodes = Child("benchmarks.paced_nodes", *paced, "--nodes", str(NUM_DECODE), "--prefill", str(num_prefill))
        with running(nodes):
            wait_for_nodes(router, NUM_DECODE + num_prefill)
            found = watch(partial(usage, router.process.pid), int(router.url.rsplit(":", 1)[1]), load, args)
            nodes.process.terminate()
            return found | {"hand_offs": nodes.read()["num_hand_offs"]}
    finally:
        router.stop()


@contextlib.contextmanager
def smg_process(ports: dict[str, list[int]], folder: Path, model: str = MODEL) -> Iterator[tuple[int, int]]:
    """Yield the process id and the port of a router that is ready."""
    port, command = free_port(HOST), [str(smg() / "smg"), "launch", "--host", HOST]
    command += ["--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(free_port(HOST))]
    urls = {kind: [f"http://127.0.0.1:{one}" for one in found] for kind, found in ports.items()}
    if urls["prefill"]:
        command += ["--pd-disaggregation", *(word for url in urls["prefill"] for word in ("--prefill", url, "8998"))]
        command += [word for url in urls["decode"] for word in ("--decode", url)]
    else:
        command += ["--worker-urls", *urls["decode"]]
    with (folder / "smg.log").open("wb") as log:
        backend = "sglang" if model == MODEL else "vllm"
        process = subprocess.Popen([*command, "--backend", backend, *SMG_FLAGS], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for_models(port, model)
        yield process.pid, port
    finally:
        process.kill()
        process.wait()


def wait_for_models(port: int, model: str) -> None:
    url = f"http://127.0.0.1:{port}/v1/models"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=ANSWER_S) as reply:
            if model.encode() in reply.read():
                time.sleep(1.0)  # smg does not tell when its other servers are registered
                return
        time.sleep(0.1)
    raise RuntimeError("smg did not start")


def measure_smg(load: Load, num_prefill: int, args: argparse.Namespace) -> dict[str, Any]:
    counts = ["--decode", str(NUM_DECODE), "--prefill", str(num_prefill), "--itl", str(load.itl_s)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Child("benchmarks.routers.paced_workers", *counts)) as workers,
    ):
        with smg_process(workers.read(), Path(folder)) as (pid, port):
            found = watch(partial(usage, pid), port, load, args)
        return found | {"hand_offs": workers.ask()["prefill"]}


def measure_vllm(streams: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure smg and the API server of vLLM together. The engine computes at the rate that the machine allows."""
    load = Load(f"{streams}:1")
    serve = vllm_server(vllm(), hf_folder(), threads=1)
    with tempfile.TemporaryDirectory() as folder, serve(Room(streams, args.prompt_words + args.max_tokens)) as behind:
        (api,) = (child for child in psutil.Process().children() if str(behind) in child.cmdline())
        with smg_process({"prefill": [], "decode": [behind]}, Path(folder), BENCH_MODEL) as (pid, port):

            def spent() -> tuple[float, int]:
                cpu_s, resident = usage(pid)
                times = api.cpu_times()  # without its child, the engine
                return cpu_s + times.user + times.system, resident + api.memory_info().rss

            return watch(spent, port, load, args, BENCH_MODEL)


def beside_vllm(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row of smg with vLLM, then Baton's row at the same rate."""
    for streams in map(int, args.vllm_streams.split(",")):
        found = measure_vllm(streams, args)
        row = {"mode": "vllm", "streams": streams, "tokens_per_s": found["events_per_s"]}
        yield {"router": "smg and vllm", **row, **found}
        load = Load(f"{streams}:{found['events_per_s']}")
        yield {"router": "baton", **row, **measure_baton(load, 0, args)}


def beside_mocks(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for load in map(Load, args.loads.split(",")):
        for mode in args.modes.split(","):
            for name, measure in (("baton", measure_baton), ("smg", measure_smg)):
                row = {"router": name, "mode": mode, "streams": load.streams, "tokens_per_s": load.tokens_per_s}
                yield row | measure(load, MODES[mode], args)


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--loads", default="64:2000,1000:4000", help="streams and their tokens a second in total")
    parser.add_argument("--modes", default="regular,pd")
    parser.add_argument("--vllm", action="store_true", help="a server of vLLM behind smg; takes the place of the loads")
    parser.add_argument("--vllm-streams", default="16,64", help="chats with --vllm")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=64)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and chat template Baton's router has")
    args = parser.parse_args()
    raise_limit()
    os.environ["PYTHONUNBUFFERED"] = "1"
    smg()  # it is installed before the first measurement
    rows = []
    for row in beside_vllm(args) if args.vllm else beside_mocks(args):
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    report({"rows": rows}, args.json)
    return 0 if all(not row["lost"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
