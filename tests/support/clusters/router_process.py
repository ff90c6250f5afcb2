"""The real router as a process of its own, on free ports, with log lines kept."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from shared.core import launcher
from tests.support.clusters.metrics_page import bearer, read_metrics
from tests.support.machine.patience import HANDS_OVER, HANG_GUARD_S, NEUTRAL_DEFAULTS

ROOT = Path(__file__).resolve().parents[3]
SERVING = re.compile(r"serving url=(\S+) nodes=(\S+)")


class RouterProcess:
    def __init__(
        self,
        *flags: str,
        model: str = "hashlm",
        api_key: str = "",
        program: Sequence[str] = launcher.command("deploy.cli", "router"),
    ) -> None:
        command = [*program, "--model", model]
        command += ["--port", "0", "--node-endpoint", "tcp://127.0.0.1:0", *HANDS_OVER, *NEUTRAL_DEFAULTS, *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.key = api_key  # what `metric` shows the router; the caller passes --api-key-file
        self.url = ""
        self.nodes = ""
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._serving.wait(HANG_GUARD_S) and self.url, "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            found = SERVING.search(line)
            if found:
                self.url, self.nodes = found.groups()
                self._serving.set()
        self._serving.set()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(HANG_GUARD_S)
        self._reader.join(HANG_GUARD_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        print(*self.lines[-40:], sep="\n")  # pytest shows it if the test fails
        return code

    def metric(self, name: str) -> float:
        """The value of one line of /metrics, labels included in `name`; 0 where it is not there."""
        answer = httpx.get(self.url + "/metrics", headers=bearer(self.key), timeout=HANG_GUARD_S).raise_for_status()
        for line in answer.text.splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def outcomes(self) -> dict[str, float]:
        """How many requests ended, by the label that says how. The metric has a sample of 0 for each other way."""
        metrics = read_metrics(self.url, self.key)
        return {labels: value for (name, labels), value in metrics.items() if name == "baton_requests_total" and value}


def eventually(what: Callable[[], object]) -> None:
    """Waits for something another process or thread will do; how long it takes is no part of the test."""
    deadline = time.monotonic() + HANG_GUARD_S
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
