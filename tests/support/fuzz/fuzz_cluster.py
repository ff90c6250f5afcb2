"""A real router, a prefill and a decode node with keys, real clients whose streams are checked, and a fuzzing node
among them. The oracles: nobody ends, nobody trips, streams that never went to the fuzzer are whole, nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from shared.config.settings.endpoints import KEY_MARK
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.node.assembly.assemble import pool_planes
from shared.node.assembly.fingerprint import make_fingerprint
from shared.wire.keys.key_files import read_pair
from shared.wire.messages import Fingerprint
from tests.support.clusters.chaos_cluster import Endpoint, write_api_key
from tests.support.clusters.key_folders import make_keys
from tests.support.clusters.metrics_page import at_rest, bearer, nodes_of, pages_partition, read_metrics
from tests.support.clusters.procs import NodeProcess
from tests.support.clusters.router_process import RouterProcess
from tests.support.fuzz.fuzz_node import FuzzNode, NodeAim
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.mixed_clients import Client, make_client, stream

REQUEST_TIMEOUT_S = 30
ENDPOINT = re.compile(r'ready endpoint="?(\S+?)"? ')
NODES = {"p0": "prefill", "d0": "decode"}
FUZZER = "fuzz"
API_KEY = "clients-key"
NODE_FLAGS = ("--silence-s", "1.5", "--chunk-size", "128", "--kv-bytes", "2MiB", "--lease-s", "2")


class FuzzCluster:
    def __init__(self, folder: Path, *, has_keys: bool = True) -> None:
        """has_keys: between routers and nodes, and for clients."""
        self._others = set(psutil.Process().children(recursive=True))  # of tests before this one
        self.keys = make_keys(folder / "keys", nodes=(*NODES, FUZZER), routers=("router",))
        self.has_keys = has_keys
        self.api_key = API_KEY if has_keys else ""
        keys = ("--keys", str(self.keys)) if has_keys else ()
        common = (*keys, f"--parent-pid={os.getpid()}")
        clients = ("--api-key-file", str(write_api_key(folder, API_KEY))) if has_keys else ()
        times = ("--node-silence-s", "1.5", "--request-timeout-s", str(REQUEST_TIMEOUT_S))
        self.routers = [RouterProcess(*common, *times, *clients, api_key=self.api_key)]
        router = Endpoint(self.routers[0].nodes)
        self.nodes = {
            name: NodeProcess(role, name, router, folder, *common, *NODE_FLAGS)  # type: ignore[arg-type]
            for name, role in NODES.items()
        }
        self.eventually(lambda: self.ready_nodes() == set(NODES), "all nodes are ready")
        self.outcomes: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return self.routers[0].url

    def fuzz(self, seed: int, kind: type[FuzzNode] = FuzzNode) -> FuzzNode:
        keys = self.keys if self.has_keys else None
        return kind(keys, FUZZER, NodeAim((self.routers[0].nodes,), self.named_nodes()), fingerprint(), seed)

    def named_nodes(self) -> dict[str, str]:
        """What a fuzzing node calls the nodes, and where it dials them."""
        return dict(zip((f"{name}@1" for name in self.nodes), self.node_addresses(), strict=True))

    def servers(self) -> dict[str, bytes]:
        """Public keys that an outsider may know, by endpoint."""
        if not self.has_keys:
            return {}
        found = (address.partition(KEY_MARK) for address in self.node_addresses())
        router = read_pair(self.keys, "router").public
        return {endpoint: bytes.fromhex(key) for endpoint, _, key in found} | {self.routers[0].nodes: router}

    @property
    def processes(self) -> dict[str, subprocess.Popen[Any]]:
        return {name: node.process for name, node in self.nodes.items()} | {"router": self.routers[0].process}

    def node_addresses(self) -> list[str]:
        """Where the nodes are dialled, with their keys."""
        found = [ENDPOINT.search(node.log) for node in self.nodes.values()]
        assert all(found), "no `ready` line"
        return [match[1] for match in found if match]

    def node_endpoints(self) -> list[str]:
        return [address.partition(KEY_MARK)[0] for address in self.node_addresses()]

    def ready_nodes(self) -> set[str]:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.url}/ready", headers=bearer(self.api_key), timeout=HANG_GUARD_S)
            nodes = answer.json()["nodes"]
            return {node["node"] for node in nodes if node["ready"]}
        return set()

    def eventually(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():
            self.check_alive()
            assert time.monotonic() < deadline, f"never: {what}\n{self.last_words()}"
            time.sleep(0.1)

    def last_words(self) -> str:
        return "\n----\n".join(log[-2500:] for log in self.logs())

    def logs(self) -> list[str]:
        return [*(node.log for node in self.nodes.values()), "\n".join(self.routers[0].lines)]

    # ---- clients

    async def serve(self, fuzzer: FuzzNode | None, more: Callable[[], bool], num_clients: int = 3) -> None:
        """Streams by so many clients, until there is enough; without a fuzzing node each is whole."""
        indices = iter(range(1, 1 << 30))
        async with self.http() as http:
            await asyncio.gather(*(self._one_after_another(http, fuzzer, more, indices) for _ in range(num_clients)))

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=HANG_GUARD_S, headers=bearer(self.api_key))

    async def _one_after_another(
        self, http: httpx.AsyncClient, fuzzer: FuzzNode | None, more: Callable[[], bool], indices: Iterator[int]
    ) -> None:
        while more():
            client = make_client(next(indices), 40)
            if not client.fields.get("stop", "x"):
                del client.fields["stop"]
            await stream(http, self.url, client)
            self.judge(client, fuzzer)
            self.check_alive()

    def judge(self, client: Client, fuzzer: FuzzNode | None) -> None:
        """What the fuzzer was given it may spoil; a declared error is an answer; anything else must be right."""
        if fuzzer is not None and tuple(client.prompt) in fuzzer.prompts:
            self.outcomes["the fuzzer's"] += 1
        elif client.error and fuzzer is not None:
            self.outcomes[f"error: {json.loads(client.error).get('error', json.loads(client.error))['code']}"] += 1
        else:
            client.check()
            self.outcomes["whole"] += 1

    # ---- oracles

    def check_alive(self) -> None:
        ended = [name for name, node in self.nodes.items() if node.process.poll() is not None]
        assert not ended and self.routers[0].process.poll() is None, f"{ended}\n{self.last_words()}"

    def check_whole(self) -> None:
        """After the fuzzer has gone: all are ready, every page and row is back, nobody has tripped over anything."""
        self.eventually(lambda: self.ready_nodes() == set(NODES), "all nodes are ready")
        self.eventually(self._whole, "pools are whole again")
        for log in self.logs():
            assert "Traceback" not in log and "add up" not in log, log[log.find("Traceback") - 500 :][:3000]

    def _whole(self) -> bool:
        metrics = read_metrics(self.url, self.api_key)
        return set(NODES) <= nodes_of(metrics) and at_rest(metrics) and pages_partition(metrics)

    def close(self) -> None:
        """SIGTERM ends everyone with status 0."""
        processes = [node.process for node in self.nodes.values() if node.process.poll() is None]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        try:
            statuses = [process.wait(HANG_GUARD_S) for process in processes] + [self.routers[0].stop()]
            assert not any(statuses), f"{statuses}\n{self.last_words()}"
            left = set(psutil.Process().children(recursive=True)) - self._others
            assert not left, f"left behind: {left}"
        finally:
            for node in self.nodes.values():
                node.close()


def fingerprint() -> Fingerprint:
    """That of the nodes: the fuzzer fits."""
    model = load_model("hashlm", LoadOptions("bfloat16", max_context=0, threads=1), "cpu")
    return make_fingerprint(model.spec, pool_planes(model, None, 16), 16, None, "fuzz")


@contextlib.contextmanager
def fuzz_cluster(folder: Path, *, has_keys: bool = True) -> Iterator[FuzzCluster]:
    cluster = FuzzCluster(folder, has_keys=has_keys)
    try:
        yield cluster
    finally:
        cluster.close()
