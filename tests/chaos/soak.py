"""A whole cluster under load for long: every stream is checked, and memory, descriptors and threads of each process
must stay flat. With --faults processes die, freeze (some for a minute) and lose their wires all the while.

    make soak MINUTES=30        make soak MINUTES=30 FAULTS='--faults --keys'

Flat: the median of the slopes between samples (Theil-Sen: outliers don't move it) adds up to less than the bounds
below. The first part of each process's life is left out, for pools, caches and bounded memories fill up then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil

from tests.support.clusters.chaos_cluster import ChaosCluster
from tests.support.machine.patience import SILENCE_S
from tests.support.web.mixed_clients import make_client
from tests.support.web.sdk_clients import check_whole_or_broken, stream

SMALL_POOL = ("--kv-bytes", "400KiB")  # full before the first sample counts
SAMPLE_S = 2.0
FAULT_EVERY_S = 15.0
NUM_CLIENTS = 6
LONG_FREEZE_S = 60.0
WARM_UP, MOST_WARM_UP_S = 0.3, 150.0  # share of the whole run, for each process; with faults few live longer
MIN_SAMPLES = 20
MAX_POINTS = 150  # of one series in its slope, which looks at every pair
MIB = 1 << 20
BOUNDS = {"memory_mib": 6.0, "descriptors": 3.0, "threads": 1.0}  # growth over all samples
MEMORY_SHARE = 0.05  # or so much of the mean, where that is more


@dataclass
class Series:
    """One figure of one process; seconds and values."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def growth(self) -> float:
        """Slope times duration."""
        step = max(1, len(self.at) // MAX_POINTS)
        points = list(zip(self.at[::step], self.values[::step], strict=True))
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2)]
        return statistics.median(slopes) * (self.at[-1] - self.at[0])

    def bound(self, figure: str) -> float:
        share = MEMORY_SHARE * statistics.mean(self.values) if figure == "memory_mib" else 0.0
        return max(BOUNDS[figure], share)


class Watch:
    """Samples of all processes, by (name, process id, figure)."""

    def __init__(self, cluster: ChaosCluster, warm_up_s: float) -> None:
        self._cluster = cluster
        self._warm_up_s = warm_up_s
        self._born: dict[int, float] = {}
        self.series: defaultdict[tuple[str, int, str], Series] = defaultdict(Series)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            now = time.monotonic()
            for name, pid in self._pids():
                if now - self._born.setdefault(pid, now) >= self._warm_up_s:
                    with contextlib.suppress(psutil.Error):
                        self._sample(name, psutil.Process(pid), now)

    def _pids(self) -> list[tuple[str, int]]:
        nodes = [(name, node.process.pid) for name, node in self._cluster.nodes.items()]
        return [("router", self._cluster.routers[0].process.pid), *nodes]

    def _sample(self, name: str, process: psutil.Process, now: float) -> None:
        figures = {
            "memory_mib": process.memory_info().rss / MIB,
            "descriptors": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }
        for figure, value in figures.items():
            series = self.series[name, process.pid, figure]
            series.at.append(now)
            series.values.append(value)

    def report(self) -> bool:
        """Prints every series; False when one grows, or when there was too little to tell."""
        judged, flat = 0, True
        print(f"{'process':<10}{'pid':>8}  {'figure':<12}{'mean':>9}{'minutes':>9}{'growth':>9}{'bound':>8}")
        for (name, pid, figure), series in sorted(self.series.items()):
            if len(series.at) < MIN_SAMPLES:
                continue
            judged += 1
            growth, bound = series.growth(), series.bound(figure)
            grows = growth >= bound
            flat = flat and not grows
            minutes = (series.at[-1] - series.at[0]) / 60
            mean = statistics.mean(series.values)
            verdict = "  GROWS" if grows else ""
            print(f"{name:<10}{pid:>8}  {figure:<12}{mean:>9.1f}{minutes:>9.1f}{growth:>9.2f}{bound:>8.1f}{verdict}")
        return flat and judged > 0


class Load:
    """Clients without a pause, some of whom hang up. With faults a declared error is an end too."""

    def __init__(self, url: str, until: float, num_clients: int, errors_allowed: bool) -> None:
        self._url = url
        self._num_clients = num_clients
        self._until = until
        self._errors_allowed = errors_allowed
        self._next = itertools.count(1)
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0

    async def run(self) -> None:
        async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as sdk:
            await asyncio.gather(*(self._one_after_another(sdk) for _ in range(self._num_clients)))

    async def _one_after_another(self, sdk: openai.AsyncOpenAI) -> None:
        while time.monotonic() < self._until:
            index = next(self._next)
            rng = random.Random(index)
            client = make_client(index, rng.choice([12, 30, 60, 150]), rng.choice([0, 0, 10, 300, 800]))
            if client.fields.get("stop") == "":  # its answer has no text to take one from
                del client.fields["stop"]
            patience_s = rng.choice([None, None, None, 0.0, 0.02, 0.1])
            try:
                await asyncio.wait_for(stream(sdk, client), patience_s)
            except TimeoutError:
                self.outcomes["hung up"] += 1
                continue
            self.tokens += client.num_tokens
            assert self._errors_allowed or not client.error, f"{client.error}: {client.fields}"
            check_whole_or_broken(client)
            self.outcomes["declared error" if client.error else "complete"] += 1


class Faults:
    """One after another, each healed before the next."""

    def __init__(self, cluster: ChaosCluster, until: float) -> None:
        self._cluster = cluster
        self._until = until
        self._rng = random.Random(1)
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        kinds: list[Callable[[str], None]] = [self._kill, self._freeze, self._cut, self._hold]
        while time.monotonic() < self._until - 2 * FAULT_EVERY_S:
            await asyncio.sleep(FAULT_EVERY_S)
            kind, victim = self._rng.choice(kinds), self._rng.choice(list(self._cluster.nodes))
            left_s = self._until - time.monotonic()
            is_long = kind == self._freeze and left_s > 2 * LONG_FREEZE_S and self._rng.random() < 0.5
            lasts_s = LONG_FREEZE_S if is_long else 2 * SILENCE_S
            kind(victim)
            role = "prefill" if victim[0] == "p" else "decode"
            self.done[f"{kind.__name__.strip('_')} {role} {lasts_s:.0f} s"] += 1
            await asyncio.sleep(lasts_s)
            self._thaw(victim)
            self._cluster.calm()
            self._cluster.restart_dead()
            await asyncio.to_thread(self._cluster.wait_ready)

    def _thaw(self, victim: str) -> None:
        process = self._cluster.nodes[victim].process
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)

    def _kill(self, victim: str) -> None:
        self._cluster.kill(victim)

    def _freeze(self, victim: str) -> None:
        os.kill(self._cluster.nodes[victim].process.pid, signal.SIGSTOP)

    def _cut(self, victim: str) -> None:
        self._cluster.proxy.cut(f"router0@{victim}")

    def _hold(self, victim: str) -> None:
        self._cluster.proxy.links[victim].held = True


async def soak(cluster: ChaosCluster, seconds: float, num_clients: int, with_faults: bool) -> bool:
    until = time.monotonic() + seconds
    load, faults = Load(cluster.url, until, num_clients, with_faults), Faults(cluster, until)
    watch = Watch(cluster, min(seconds * WARM_UP, MOST_WARM_UP_S) if with_faults else seconds * WARM_UP)
    aside = [asyncio.create_task(watch.run()), asyncio.create_task(tell_every_minute(load, faults))]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        if with_faults:
            tasks.create_task(faults.run())
    for task in aside:
        task.cancel()
    tell(load, faults)
    return watch.report()


def tell(load: Load, faults: Faults) -> None:
    print(f"{dict(load.outcomes)}, {load.tokens} tokens; faults: {dict(faults.done)}", flush=True)


async def tell_every_minute(load: Load, faults: Faults) -> None:
    for minute in itertools.count(1):
        await asyncio.sleep(60.0)
        print(f"{minute:3} min  ", end="")
        tell(load, faults)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="load for many minutes; what grows is an error")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="streams at a time")
    parser.add_argument("--keys", action="store_true", help="between router and nodes")
    parser.add_argument("--faults", action="store_true", help="kill, freeze and cut off nodes meanwhile")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        cluster = ChaosCluster(Path(folder), node_flags=SMALL_POOL, has_keys=options.keys)
        try:
            flat = asyncio.run(soak(cluster, 60 * options.minutes, options.clients, options.faults))
            cluster.check_whole()
        finally:
            cluster.close()
    print("flat" if flat else "NOT FLAT")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
