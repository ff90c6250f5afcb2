"""`baton up` as a user would start it: real router and node processes on loopback, HashLM or a real model."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from shared.core import launcher
from tests.support.clusters.metrics_page import Metrics, at_rest, nodes_of, pages_partition, read_metrics
from tests.support.machine.patience import HANDS_OVER, HANG_GUARD_S, NEUTRAL_DEFAULTS, ON_CPU, PATIENT_UP
from tests.support.machine.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


class Cluster:
    """Owns the supervisor process; its children end with it. `program`: the `baton` command."""

    def __init__(
        self,
        log: Path,
        *flags: str,
        program: Sequence[str] = launcher.command("deploy.cli"),
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log_path = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        own = ("--port", str(self.port), *PATIENT_UP, *HANDS_OVER, *NEUTRAL_DEFAULTS, *ON_CPU)
        command = [*program, "up", *own, *flags]
        with log.open("wb") as sink:
            self.process = subprocess.Popen(command, cwd=cwd, env=env, stdout=sink, stderr=subprocess.STDOUT)
        self._supervisor = psutil.Process(self.process.pid)
        self.eventually(self._is_ready, "the cluster is ready")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log_path.read_text()[-3000:]
        return "Baton is ready" in self.log_path.read_text()

    def eventually(self, condition: object, what: str) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"never: {what}\n{self.log_path.read_text()[-3000:]}"
            time.sleep(0.05)

    def node_pid(self, role: str) -> int:
        """The process whose argv says `baton ROLE`."""
        for child in self._supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if role in child.cmdline():
                    return child.pid
        raise AssertionError(f"no {role} process")

    def metrics(self) -> Metrics:
        return read_metrics(self.url)

    def at_rest(self) -> bool:
        """The metrics say: no open request, every page free or cached, every row free, on every node."""
        metrics = self.metrics()
        assert nodes_of(metrics), "no node gauges in /metrics"
        return at_rest(metrics)

    def pages_partition(self) -> bool:
        return pages_partition(self.metrics())

    def stop(self) -> int:
        """Ctrl-C; gives the exit status and asserts that nobody is left."""
        family = self._supervisor.children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(HANG_GUARD_S)
        _, alive = psutil.wait_procs(family, timeout=HANG_GUARD_S)
        assert not alive, f"orphans: {alive}"
        return status


@contextlib.contextmanager
def baton_up(log: Path, *flags: str, **process: Any) -> Iterator[Cluster]:
    """`process`: the Cluster's program, cwd and env."""
    cluster = Cluster(log, *flags, **process)
    try:
        yield cluster
    finally:
        if cluster.process.poll() is None:
            cluster.stop()
