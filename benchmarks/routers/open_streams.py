"""Hold 10,000 streams open at 2,000 tokens a second in total, through one router: its event loop's lag and memory.

    python -m benchmarks.routers.open_streams [--streams 10000] [--tokens-per-s 2000] [--seconds 60]
                                              [--prompt-tokens 32]

Router, nodes (benchmarks.paced_nodes) and clients (benchmarks.routers.stream_clients) are three processes. Each token
is one event of its stream. The lag is sampled every 5 ms in the router's loop. Memory of a stream is the growth of the
router's resident memory, from the time before the first stream, divided by the streams. Exit status 1 when the lag's
p99.9 is 100 ms or more, a stream needs more than 60 kB, streams were lost, or fewer than 95 % of the tokens came.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.probed_router import read_lags
from benchmarks.report import parser_with_json, report
from benchmarks.sse_client import percentile
from tests.support.clusters.router_process import RouterProcess

ROOT = Path(__file__).resolve().parents[2]
MOST_LAG_MS, MOST_KB = 100.0, 60.0
LEAST_RATE = 0.95  # of the tokens a second that were asked for
STOP_S = 60.0  # a child that has not ended by then is killed
SPARE = 2_000  # connections and requests that the router allows beside the streams
BEFORE_S = 2.0  # from the last stream's first event to the measurement


class Child:
    """A process of this measurement that answers with lines of JSON."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running(child: Child) -> Iterator[Child]:
    try:
        yield child
    finally:
        child.stop()


def router_of(args: argparse.Namespace, lags: Path) -> RouterProcess:
    room = str(args.streams + SPARE)
    flags = ["--served-model-name", "bench", "--max-connections", room, "--max-open-requests", room]
    flags += ["--max-queued-requests", room, "--request-timeout-s", "3600"]
    program = (sys.executable, "-m", "benchmarks.probed_router", str(lags))
    return RouterProcess(*flags, model=args.model, program=program)


def wait_for_nodes(router: RouterProcess, count: int) -> None:
    deadline = time.monotonic() + 60
    while sum("node is here" in line for line in router.lines) < count:
        assert time.monotonic() < deadline, "the nodes did not come"
        time.sleep(0.05)


def lag_ms(lags: list[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
    return {name: round(1e3 * percentile(lags, share), 2) for name, share in shares.items()} | {"samples": len(lags)}


def core_wait_s(pid: int) -> float:
    """Return how long the event loop's thread was runnable, but other programs had the cores."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def usage(pid: int) -> tuple[float, int]:
    """Return CPU seconds and resident bytes of a process and its children."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    times = [one.cpu_times() for one in family]
    return sum(one.user + one.system for one in times), sum(one.memory_info().rss for one in family)


def watch(router: RouterProcess, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Return figures of the steady phase, and when each phase began and ended."""
    pid = router.process.pid
    paced = [router.nodes, "--tokens-per-s", str(args.tokens_per_s), "--streams", str(args.streams)]
    paced += ["--nodes", str(args.nodes), "--rows", str(args.rows)]
    with running(Child("benchmarks.paced_nodes", *paced)):
        wait_for_nodes(router, args.nodes)
        cpu_before, idle_bytes = usage(pid)
        opening = time.monotonic()
        words = [router.url.rsplit(":", 1)[1], "--streams", str(args.streams), "--per-s", str(args.per_s)]
        words += ["--max-tokens", str(args.max_tokens), "--prompt-tokens", str(args.prompt_tokens)]
        with running(Child("benchmarks.routers.stream_clients", *words)) as clients:
            opened = clients.read()
            cpu_opened, _ = usage(pid)
            time.sleep(BEFORE_S)
            before, (cpu_begin, _), waited_s = clients.ask(), usage(pid), core_wait_s(pid)
            time.sleep(args.seconds)
            after, (cpu_end, full_bytes) = clients.ask(), usage(pid)
            waited_s = core_wait_s(pid) - waited_s
    seconds, events = after["at"] - before["at"], after["events"] - before["events"]
    figures = {
        "streams": after["begun"],
        "lost": after["lost"],
        "statuses": after["statuses"],
        "whole": after["whole"],
        "events_per_s": round(events / seconds, 1),
        "router_idle_mb": round(idle_bytes / 1e6, 1),
        "router_full_mb": round(full_bytes / 1e6, 1),
        "kb_per_stream": round((full_bytes - idle_bytes) / 1e3 / args.streams, 1),
        "cpu_share": round((cpu_end - cpu_begin) / seconds, 3),
        "core_wait_share": round(waited_s / seconds, 3),
        "cpu_us_per_token": round(1e6 * (cpu_end - cpu_begin) / events, 1),
        "cpu_us_per_opening": round(1e6 * (cpu_opened - cpu_before) / args.streams, 1),
    }
    return figures, {"opening": (opening, opened["at"]), "steady": (before["at"], after["at"])}


def is_good(figures: dict[str, Any], args: argparse.Namespace) -> bool:
    lag, memory = figures["lag_ms"]["steady"]["p99_9"], figures["kb_per_stream"]
    has_load = figures["streams"] == args.streams and figures["events_per_s"] >= LEAST_RATE * args.tokens_per_s
    return has_load and lag < MOST_LAG_MS and memory <= MOST_KB and not figures["lost"]


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--tokens-per-s", type=float, default=2_000.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the steady phase")
    parser.add_argument("--per-s", type=float, default=250.0, help="streams that are opened in a second")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32, help="tokens in a node's message")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer the router has")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lags = Path(folder) / "lags"
        router = router_of(args, lags)
        try:
            figures, phases = watch(router, args)
        finally:
            router.stop()
        figures["lag_ms"] = {name: lag_ms(read_lags(lags, *phase)) for name, phase in phases.items()}
    report({"streams_wanted": args.streams, "prompt_tokens": args.prompt_tokens, **figures}, args.json)
    return 0 if is_good(figures, args) else 1


if __name__ == "__main__":
    sys.exit(main())
