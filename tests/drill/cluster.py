"""A cluster over several hosts, as its users start it: `baton router`, `baton prefill` and `baton decode` with keys and
default settings. Two routers, two nodes of each kind, each on a host of its own; HashLM, so that streams are exact.

What differs from the defaults: small pools, one thread, hand-offs whatever they cost, and streams that wait for nodes
as long as it takes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shared.core import launcher
from tests.drill.hosts import Host, Site
from tests.support.clusters.chaos_cluster import ready_nodes
from tests.support.clusters.metrics_page import at_rest, nodes_of, pages_partition, read_metrics
from tests.support.machine.patience import HANDS_OVER, HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[2]
BATON = launcher.command("deploy.cli")
ROUTERS, NODES = ("router0", "router1"), ("p0", "p1", "d0", "d1")
URL = "http://127.0.0.1:8000"  # of each router, seen from its own host
NODE_PORT = 7001
MODEL_FLAGS = ("--model", "hashlm")
ROUTER_FLAGS = ("--port", "8000", "--resume-wait-s", str(HANG_GUARD_S), "--admin-without-key", *HANDS_OVER)
NODE_FLAGS = ("--threads", "1", "--transport", "zmq", "--kv-bytes", "4MiB", "--chunk-size", "128")
LOST = re.compile(r" node is (?:lost|gone) node=(\S+) ")
POLL_S = 0.1
Pair = tuple[str, str]


@dataclass(eq=False)
class Daemon:
    """One life of one `baton` process."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()


class DrillCluster:
    """Daemons by the name of their host, which is their own name too."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self._folder = folder
        self._lives = 0
        self.daemons: dict[str, Daemon] = {}
        self.logs: list[Path] = []
        self._make_keys()
        for name in (*ROUTERS, *NODES):
            self.start(name)
        self.wait_ready()

    def _make_keys(self) -> None:
        """Each host gets the list and its own secret, as `baton keys create` says."""
        trusted = self._folder / "keys"
        command = [*BATON, "keys", "create", str(trusted), "--router", *ROUTERS, "--node", *NODES]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        for name in self.site.hosts:
            own = self._folder / name
            own.mkdir(mode=0o700)
            for file in ("allowed", f"{name}.secret"):
                shutil.copy(trusted / file, own / file)  # and its mode

    # ---- daemons

    def start(self, name: str) -> None:
        """Also again, after its end."""
        self._lives += 1
        log_path = self._folder / f"{name}.{self._lives}.log"
        self.logs.append(log_path)
        common = ["--keys", str(self._folder / name), f"--parent-pid={os.getpid()}", *MODEL_FLAGS]
        command = [*BATON, *self._words(self.site.hosts[name]), *common]
        with log_path.open("wb") as log:
            process = self.site.hosts[name].do(  # a session of its own: Ctrl-C is for the drill, which ends it in order
                subprocess.Popen, command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        self.daemons[name] = Daemon(process, log_path)

    def _words(self, host: Host) -> list[str]:
        endpoints = {name: f"tcp://{self.site.hosts[name].address}:{NODE_PORT}" for name in ROUTERS}
        if host.name in ROUTERS:
            return ["router", "--router-id", host.name, "--node-endpoint", endpoints[host.name], *ROUTER_FLAGS]
        dials = [word for endpoint in endpoints.values() for word in ("--router", endpoint)]
        role = "prefill" if host.name.startswith("p") else "decode"
        return [role, "--node-id", host.name, "--bind-host", host.address, *dials, *NODE_FLAGS]

    def kill(self, name: str) -> None:
        self.daemons[name].process.kill()
        self.wait_for_end(name)

    def wait_for_end(self, name: str) -> int:
        return self.daemons[name].process.wait(HANG_GUARD_S)

    def freeze(self, name: str) -> None:
        self.daemons[name].process.send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.daemons[name].process.send_signal(signal.SIGCONT)

    def heal(self) -> None:
        """Every cable is whole, everyone is awake and alive, and everyone knows everyone."""
        self.site.mend()
        for name, daemon in list(self.daemons.items()):
            if daemon.process.poll() is None:
                self.thaw(name)
            else:
                self.start(name)
        self.wait_ready()

    def close(self) -> None:
        """SIGTERM ends everyone; afterwards nobody is left, whatever went wrong."""
        try:
            for name, daemon in self.daemons.items():
                if daemon.process.poll() is None:
                    self.thaw(name)
                    daemon.process.terminate()
            statuses = {name: self.wait_for_end(name) for name in self.daemons}
            assert not any(statuses.values()), f"{statuses}\n{self.last_words()}"
        finally:
            for daemon in self.daemons.values():
                daemon.process.kill()
                daemon.process.wait(HANG_GUARD_S)

    # ---- what routers say

    def at(self, router: str, look: Callable[..., Any], *args: Any) -> Any:
        """On the router's own host, for its HTTP API is there only."""
        return self.site.hosts[router].do(look, URL, *args)

    def admin(self, router: str, path: str, body: dict[str, object]) -> None:
        def post(url: str) -> httpx.Response:
            return httpx.post(f"{url}/admin/{path}", json=body, timeout=HANG_GUARD_S)

        answer = self.at(router, post)
        assert answer.status_code < 300, answer.text

    def open_on(self, node: str, router: str) -> int:
        """Sequences of the router's that need the node."""
        status = self.at(router, lambda url: httpx.get(f"{url}/admin/status", timeout=HANG_GUARD_S).json())
        return next(known["open_sequences"] for known in status["nodes"] if known["node"] == node)

    def resumed(self, router: str) -> int:
        """By this life of the router."""
        return int(self.at(router, read_metrics)["baton_resumed_total", ""])

    def lost_nodes(self) -> Counter[Pair]:
        """(router, node that it gave up): how many times so far, by all lives of routers."""
        told = [(path.name.partition(".")[0], path.read_text()) for path in self.logs]
        return Counter((name, node) for name, text in told if name in ROUTERS for node in LOST.findall(text))

    def wait_ready(self) -> None:
        for router in ROUTERS:
            self.eventually(lambda r=router: self.at(r, ready_nodes) == set(NODES), f"all are ready at {router}")

    def check_whole(self) -> None:
        """Every pool of every node is whole, at every router, and nobody has tripped over anything."""
        self.wait_ready()
        for router in ROUTERS:
            self.eventually(lambda r=router: is_whole(self.at(r, read_metrics)), f"pools are whole at {router}")
        tripped = [path.name for path in self.logs if "Traceback" in path.read_text()]
        assert not tripped, f"{tripped}\n{self.last_words()}"

    def eventually(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}\n{self.last_words()}"
            time.sleep(POLL_S)

    def last_words(self) -> str:
        """The ends of all logs: what a failed test shows."""
        return "\n----\n".join(self._ends())

    def _ends(self) -> Iterator[str]:
        for name, daemon in self.daemons.items():
            yield f"{name}: {daemon.log[-1500:]}"


def is_whole(metrics: dict[tuple[str, str], float]) -> bool:
    return nodes_of(metrics) == set(NODES) and at_rest(metrics) and pages_partition(metrics)
