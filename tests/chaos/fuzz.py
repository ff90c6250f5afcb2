"""Router and nodes troubled in every way that a test knows, with and without keys, among clients whose streams are
checked. No process may end or trip, or hold more than 256 MiB beyond rest, or keep more than 32 MiB of it a minute
later; eight honest streams keep 0.8 of the speed that they have when a sink takes the same instead.

    make fuzz                   make fuzz SECONDS=60 SEED=7 FUZZ='--mode http --keys on'

    node      a node of the cluster that says anything to everybody
    tickets   one that offers what no router gave it
    outsider  whoever reaches the ports between routers and nodes
    http      whoever reaches the HTTP port
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.clusters.procs import few_descriptors
from tests.support.fuzz.fuzz_cluster import FuzzCluster
from tests.support.fuzz.fuzz_memory import MIB, MOST_GROWTH, Held, MemoryWatch, comes_back, growth, held
from tests.support.fuzz.fuzz_modes import MODES, Mode, open_mode
from tests.support.fuzz.fuzz_speed import Streams, compare

LEAST_SPEED = 0.8
REST_S = 4.0  # of streams before anybody troubles: what processes hold at work
FLOOD_SHARE = 0.5  # of a mode's seconds at full speed; the rest at a pace, beside a sink
STARVE_SHARE = 0.25  # of the flood of an outsider, with few descriptors
SPARE_DESCRIPTORS = 200


class Verdicts:
    """What was printed as wrong."""

    def __init__(self) -> None:
        self.bad: list[str] = []

    def judge(self, what: str, text: str, is_good: bool) -> None:
        print(f"  {what}: {text}{'' if is_good else '   NOT GOOD'}", flush=True)
        if not is_good:
            self.bad.append(f"{what}: {text}")


async def serve(cluster: FuzzCluster, mode: Mode | None, seconds: float, num_clients: int = 3) -> None:
    """Streams for so long, or until the fuzzer has tripped."""
    until = time.monotonic() + seconds
    node = mode.node if mode else None
    await cluster.serve(node, lambda: time.monotonic() < until and not (mode and mode.fuzzer.has_stopped), num_clients)


@contextlib.contextmanager
def starved(cluster: FuzzCluster) -> Iterator[None]:
    with contextlib.ExitStack() as limits:
        for process in cluster.processes.values():
            limits.enter_context(few_descriptors(process.pid, SPARE_DESCRIPTORS))
        yield


def flood(cluster: FuzzCluster, mode: Mode, seconds: float, *, may_starve: bool) -> None:
    """At full speed; where connections alone can do it, the processes run out of descriptors for a while."""
    starve_s = seconds * STARVE_SHARE if may_starve else 0.0
    asyncio.run(serve(cluster, mode, seconds - starve_s))
    if starve_s:
        with starved(cluster):
            asyncio.run(serve(cluster, mode, starve_s, num_clients=1))


def fuzz(cluster: FuzzCluster, name: str, seed: int, seconds: float, rest: dict[str, Held], verdicts: Verdicts) -> None:
    cluster.outcomes.clear()
    with MemoryWatch(cluster.processes) as watch, open_mode(name, cluster, seed) as mode:
        flood(cluster, mode, seconds * FLOOD_SHARE, may_starve=name == "outsider")
        aims = {side: lambda aim=aim: mode.aim(aim) for side, aim in mode.sides.items()}
        streams = Streams(cluster, mode.node)
        sides = asyncio.run(compare(streams, aims, mode.sent_bytes, seconds * (1 - FLOOD_SHARE)))
    began = time.monotonic()
    left = comes_back(cluster.processes, rest)
    cluster.check_alive()
    cluster.check_whole()
    grown = growth(rest, watch.most)
    print(f"  done: {dict(mode.fuzzer.counts)}\n  streams: {dict(cluster.outcomes)}")
    most = ", ".join(f"{name} {size / MIB:+.0f}" for name, size in grown.items())
    verdicts.judge("most memory beyond rest, MiB", most, max(grown.values()) <= MOST_GROWTH)
    text = str(left) if left else f"within bounds after {time.monotonic() - began:.0f} s"
    verdicts.judge("back at rest", text, not left)
    target, sink = sides["target"], sides["sink"]
    share = target.speed / sink.speed if sink.speed else 0.0
    text = f"{share:.2f} of the speed ({target.text}; sink: {sink.text})"
    verdicts.judge("eight honest streams", text, share >= LEAST_SPEED)


def run(modes: list[str], has_keys: bool, seed: int, seconds: float, verdicts: Verdicts) -> None:
    """One cluster for all these modes: rest is what it held before the first."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = FuzzCluster(Path(folder), has_keys=has_keys)
        try:
            asyncio.run(serve(cluster, None, REST_S, num_clients=8))
            rest = held(cluster.processes)
            for name in modes:
                print(f"{name}, keys {'on' if has_keys else 'off'}:", flush=True)
                fuzz(cluster, name, seed, seconds, rest, verdicts)
        finally:
            cluster.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="a cluster among hostile peers, clients and outsiders")
    parser.add_argument("--seconds", type=float, default=600, help="of all modes together")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--mode", choices=MODES, help="only this one")
    parser.add_argument("--keys", choices=["on", "off"], help="only so")
    options = parser.parse_args(argv)
    modes = [options.mode] if options.mode else list(MODES)
    with_keys = [options.keys == "on"] if options.keys else [True, False]
    each = options.seconds / (len(modes) * len(with_keys))
    print(f"seed {options.seed}, {each:.0f} s for each of {len(modes) * len(with_keys)} runs", flush=True)
    verdicts = Verdicts()
    for has_keys in with_keys:
        run(modes, has_keys, options.seed, each, verdicts)
    print("\n".join(verdicts.bad) or "good")
    return 1 if verdicts.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
