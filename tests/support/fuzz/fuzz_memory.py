"""What processes hold while they are fuzzed: the most memory of each, and whether it comes back."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import psutil

MIB = 1 << 20
MOST_GROWTH = 256 * MIB
MOST_LEFT = 32 * MIB
SAMPLE_S = 0.05
BACK_S = 60.0
MOST_LEFT_OPEN = 16  # descriptors and threads: a client or two may be connected in another way
Processes = Mapping[str, "subprocess.Popen[Any]"]


@dataclass(frozen=True, slots=True)
class Held:
    rss: int
    descriptors: int
    threads: int


def held(processes: Processes) -> dict[str, Held]:
    found = {}
    for name, process in processes.items():
        one = psutil.Process(process.pid)
        found[name] = Held(one.memory_info().rss, one.num_fds(), one.num_threads())
    return found


class MemoryWatch:
    """Samples on a thread between `with` and its end; `most` is the largest memory of each process."""

    def __init__(self, processes: Processes) -> None:
        self._processes = {name: psutil.Process(process.pid) for name, process in processes.items()}
        self.most = dict.fromkeys(processes, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            try:
                for name, process in self._processes.items():
                    self.most[name] = max(self.most[name], process.memory_info().rss)
            except psutil.Error:
                return  # it has ended: that is told by who looks whether all are alive


def growth(rest: Mapping[str, Held], most: Mapping[str, int]) -> dict[str, int]:
    """Bytes beyond rest, of each process."""
    return {name: most[name] - at_rest.rss for name, at_rest in rest.items()}


def comes_back(processes: Processes, rest: Mapping[str, Held], within_s: float = BACK_S) -> dict[str, str]:
    """Wait until memory, descriptors and threads are near rest; return what is not, by process, after that time."""
    until = time.monotonic() + within_s
    while (left := _left(held(processes), rest)) and time.monotonic() < until:
        time.sleep(0.5)
    return left


def _left(now: Mapping[str, Held], rest: Mapping[str, Held]) -> dict[str, str]:
    beyond = {
        name: (one.rss - rest[name].rss, one.descriptors - rest[name].descriptors, one.threads - rest[name].threads)
        for name, one in now.items()
    }
    return {
        name: f"{rss / MIB:+.0f} MiB, {descriptors:+} descriptors, {threads:+} threads"
        for name, (rss, descriptors, threads) in beyond.items()
        if rss > MOST_LEFT or max(descriptors, threads) > MOST_LEFT_OPEN
    }
