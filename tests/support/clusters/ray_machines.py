"""A Ray cluster of simulated machines on 127.0.0.2, 127.0.0.3, ..., in a process of its own: Ray's threads and settings
stay out of the tests' process. Run as a program it obeys lines on stdin:

    kill RAY_NODE_ID      all processes of that machine at once, as if it lost power
    add                   one more machine, at the next address
    (end of file)         all of it goes
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from shared.config.settings import ray_settings
from shared.core import launcher
from tests.support.machine.installed import other_project
from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[3]
STORE_BYTES = 80 << 20
GOES_S = 30.0  # Ray's own processes end so soon, or are killed
Rows = dict[str, dict[str, Any]]  # of `baton ray status --json`, by name


def environment(home: Path) -> dict[str, str]:
    """Where Ray runs and where `baton ray` is typed, another project has packages of our names."""
    theirs = str(other_project(home))
    return {**os.environ, **ray_settings.environment(""), "PYTHONPATH": theirs, "HOME": str(home)}


class Machines:
    """Three of them at first, and one without cores, 127.0.0.1, which Ray itself can't lose."""

    def __init__(self, home: Path, cpus: int) -> None:
        command = [sys.executable, "-m", "tests.support.clusters.ray_machines", str(cpus)]
        with (home / "machines.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(home),
            )
        self.address = self._answer()

    def _answer(self) -> str:
        """Ray prints lines of its own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        raise AssertionError("the Ray cluster has ended")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._answer()

    def kill(self, ray_node: str) -> None:
        self._say(f"kill {ray_node}")

    def add(self) -> None:
        self._say("add")

    def close(self) -> None:
        family = psutil.Process(self._process.pid).children(recursive=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(HANG_GUARD_S)
        self._process.stdout.close()
        _, alive = psutil.wait_procs(family, timeout=GOES_S)
        for process in alive:
            process.kill()


@contextlib.contextmanager
def ray_machines(home: Path, cpus: int) -> Iterator[Machines]:
    machines = Machines(home, cpus)
    try:
        yield machines
    finally:
        machines.close()


class BatonRay:
    """The words of `baton ray` for one file."""

    def __init__(self, home: Path, toml: str) -> None:
        self.home = home
        self.file = home / "cluster.toml"
        self.file.write_text(toml)

    def run(self, word: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = launcher.command("deploy.cli", "ray", word, *arguments)
        return subprocess.run(
            command, cwd=self.home, env=environment(self.home), capture_output=True, text=True, timeout=HANG_GUARD_S
        )

    def up(self) -> None:
        done = self.run("up", str(self.file))
        assert done.returncode == 0 and "Baton is ready" in done.stdout, done.stdout + done.stderr

    def rows(self) -> Rows:
        done = self.run("status", str(self.file), "--json")
        assert done.stdout.startswith("["), done.stdout + done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)}

    def until(self, condition: Callable[[Rows], bool], what: str) -> Rows:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition(rows := self.rows()):
            assert time.monotonic() < deadline, f"never: {what}\n{rows}"
        return rows

    def family(self) -> list[psutil.Process]:
        """Its daemons, and the actors beside them."""
        daemons = [psutil.Process(row["pid"]) for row in self.rows().values() if row["pid"]]
        return daemons + [psutil.Process(daemon.ppid()) for daemon in daemons]


def all_run(rows: Rows) -> bool:
    """And there is somebody: the manager itself may be on its way back."""
    return bool(rows) and all(row["state"] == "running" for row in rows.values())


def pids_of(rows: Rows) -> dict[str, int]:
    return {name: row["pid"] for name, row in rows.items()}


def lose_power(raylet: int) -> None:
    """Workers and daemons with it: nobody says goodbye."""
    machine = psutil.Process(raylet)
    for process in [machine, *machine.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def serve(cpus: int) -> None:
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**settings, "num_cpus": 0})
    addresses = (f"127.0.0.{number}" for number in itertools.count(2))
    nodes = [cluster.add_node(node_ip_address=next(addresses), **settings) for _ in range(3)]
    print(f"> {cluster.address}", flush=True)
    for line in sys.stdin:
        word, _, ray_node = line.strip().partition(" ")
        if word == "add":
            nodes.append(cluster.add_node(node_ip_address=next(addresses), **settings))
        else:
            node = next(node for node in nodes if node.node_id == ray_node)
            lose_power(node.all_processes["raylet"][0].process.pid)
            nodes.remove(node)
            cluster.remove_node(node, allow_graceful=False)
        print("> done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
