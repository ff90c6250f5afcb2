"""Real routers and nodes, each way between them through the fault proxy, and the oracles of a run with faults in it.

    node --> proxy link "ROUTER@NODE" --> router          prefill node --> proxy link "NODE@epoch" --> decode node

Where prefill nodes find a decode node stands in its Hello, so the proxy writes its own address into it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import psutil

from shared.core import launcher
from shared.wire.messages import Hello, Message
from tests.support.clusters.key_folders import make_keys
from tests.support.clusters.metrics_page import at_rest, bearer, nodes_of, pages_partition, read_metrics
from tests.support.clusters.procs import NodeProcess
from tests.support.clusters.router_process import RouterProcess
from tests.support.machine.patience import HANG_GUARD_S, SILENCE_S
from tests.support.wire.curve_ends import Secrets
from tests.support.wire.proxy import FaultProxy, Seen

ROUTER_FLAGS = ("--node-silence-s", str(SILENCE_S), "--resume-wait-s", str(HANG_GUARD_S))
NODE_FLAGS = ("--silence-s", str(SILENCE_S), "--chunk-size", "128", "--mixed-chunk-size", "64", "--kv-bytes", "2MiB")
BATON = launcher.command("deploy.cli")
FLAGS_OF = {"p1": ("--transport", "zmq")}  # the other one shares memory: both transports see every fault


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a node process needs to know of its first router."""

    endpoint: str


def router_process(name: str, *flags: str, api_key: str = "", baton: Sequence[str] = BATON) -> RouterProcess:
    own = (f"--parent-pid={os.getpid()}", *ROUTER_FLAGS, "--router-id", name)
    return RouterProcess(*own, *flags, api_key=api_key, program=[*baton, "router"])


class ChaosCluster:
    """`nodes`: names that begin with p (prefill) or d (decode)."""

    def __init__(
        self,
        log_dir: Path,
        nodes: Sequence[str] = ("p0", "p1", "d0", "d1"),
        routers: int = 1,
        router_flags: tuple[str, ...] = (),
        node_flags: tuple[str, ...] = (),
        api_key: str = "",
        has_keys: bool = False,
        others: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """has_keys: between routers and nodes; the proxy ends them on both sides. others: the `baton` commands of
        routers and nodes that don't run this tree's."""
        self._others = others or {}
        self._log_dir = log_dir
        self._lives: dict[str, int] = {}
        secrets, names = None, [f"router{i}" for i in range(routers)]
        if has_keys:
            secrets = Secrets(make_keys(log_dir / "keys", nodes=nodes, routers=names))
            router_flags += ("--keys", str(secrets.folder))
            node_flags += ("--keys", str(secrets.folder))
        self._node_flags = node_flags
        self.proxy = FaultProxy(self._rewrite, secrets)
        if api_key:
            router_flags += ("--api-key-file", str(write_api_key(log_dir, api_key)))
        self.routers = [
            router_process(name, *router_flags, api_key=api_key, baton=self._others.get(name, BATON)) for name in names
        ]
        self.nodes: dict[str, NodeProcess] = {}
        for name in nodes:
            for i, router in enumerate(self.routers):
                self.proxy.link(f"router{i}@{name}", router.nodes)
            self.start(name)
        self.wait_ready()

    @property
    def url(self) -> str:
        return self.routers[0].url

    def _rewrite(self, seen: Seen) -> Message | None:
        """Every router hears of the same link."""
        hello = seen.message
        if not isinstance(hello, Hello):
            return None
        name = f"{hello.node_id}@{hello.epoch:x}"
        link = self.proxy.links.get(name) or self.proxy.link(name, hello.node_endpoint)
        self.proxy.links[hello.node_id] = link  # the newest life, by its plain name
        return msgspec.structs.replace(hello, node_endpoint=link.endpoint)

    # ---- processes

    def start(self, name: str) -> None:
        """Also again, after its end. The process ends with the thread that called this."""
        life = self._lives[name] = self._lives.get(name, 0) + 1
        folder = self._log_dir / str(life)
        folder.mkdir(exist_ok=True)
        role = "prefill" if name[0] == "p" else "decode"
        first, *others = (self.proxy.links[f"router{i}@{name}"].endpoint for i in range(len(self.routers)))
        flags = [flag for endpoint in others for flag in ("--router", endpoint)]
        flags += [f"--parent-pid={os.getpid()}", *NODE_FLAGS, *FLAGS_OF.get(name, ()), *self._node_flags]
        baton = self._others.get(name, BATON)
        self.nodes[name] = NodeProcess(role, name, Endpoint(first), folder, *flags, baton=baton)  # type: ignore[arg-type]

    def kill(self, name: str) -> None:
        """From any thread; the caller's next line finds it dead or dying."""
        os.kill(self.nodes[name].process.pid, signal.SIGKILL)

    def heal(self) -> None:
        """Everyone is alive, the weather is fine."""
        self.calm()
        self.eventually(lambda: self.restart_dead() or self._all_ready(), "everyone is back")

    def calm(self) -> None:
        self.proxy.traps.clear()
        for link in self.proxy.links.values():
            link.delay_s, link.bytes_per_s, link.held, link.refused = 0.0, float("inf"), False, False
            link.held_way = None

    def restart_dead(self) -> None:
        for name, node in self.nodes.items():
            if node.process.poll() is not None:
                self.start(name)

    def wait_ready(self) -> None:
        self.eventually(self._all_ready, "all nodes are ready")

    def _all_ready(self) -> bool:
        return all(ready_nodes(router.url, router.key) == set(self.nodes) for router in self.routers)

    def eventually(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}\n{self.last_words()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join([*(path.read_text() for path in self._log_dir.rglob("*.log")), *self._router_logs()])

    def last_words(self) -> str:
        """The ends of all logs: what a failed test shows."""
        return "\n----\n".join(
            log[-1500:] for log in [*(node.log for node in self.nodes.values()), *self._router_logs()]
        )

    def _router_logs(self) -> list[str]:
        return ["\n".join(router.lines) for router in self.routers]

    # ---- oracles

    def resumed(self) -> float:
        return sum(read_metrics(router.url, router.key)["baton_resumed_total", ""] for router in self.routers)

    def check_whole(self) -> None:
        """Every pool of every node is whole, at every router, and nobody has tripped over anything."""
        self.wait_ready()
        for router in self.routers:
            self.eventually(lambda router=router: self._whole(router), f"pools are whole again at {router.url}")
        assert "Traceback" not in self.logs(), self.last_words()
        assert not self.proxy.errors, self.proxy.errors

    def _whole(self, router: RouterProcess) -> bool:
        metrics = read_metrics(router.url, router.key)
        return nodes_of(metrics) == set(self.nodes) and at_rest(metrics) and pages_partition(metrics)

    def close(self) -> None:
        """SIGTERM ends everyone with status 0, and leaves no process behind."""
        processes = {name: node.process for name, node in self.nodes.items() if node.process.poll() is None}
        family = [child for process in processes.values() for child in psutil.Process(process.pid).children(True)]
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        try:
            statuses = {name: process.wait(HANG_GUARD_S) for name, process in processes.items()}
            statuses |= {f"router{i}": router.stop() for i, router in enumerate(self.routers)}
            assert not any(statuses.values()), f"{statuses}\n{self.last_words()}"
            assert not psutil.wait_procs(family, timeout=HANG_GUARD_S)[1], "a process was left behind"
        finally:
            for node in self.nodes.values():
                node.close()
            self.proxy.close()


def write_api_key(folder: Path, api_key: str) -> Path:
    """Write the file for `--api-key-file`; return where it is."""
    path = folder / "api.key"
    path.write_text(api_key + "\n")
    path.chmod(0o600)
    return path


def ready_nodes(url: str, api_key: str = "") -> set[str]:
    with contextlib.suppress(httpx.HTTPError):
        nodes = httpx.get(f"{url}/ready", headers=bearer(api_key), timeout=HANG_GUARD_S, verify=False).json()["nodes"]
        return {node["node"] for node in nodes if node["ready"]}
    return set()


@contextlib.contextmanager
def chaos_cluster(log_dir: Path, *args: Sequence[str], **kwargs: object) -> Iterator[ChaosCluster]:
    cluster = ChaosCluster(log_dir, *args, **kwargs)  # type: ignore[arg-type]
    try:
        yield cluster
    finally:
        cluster.close()
