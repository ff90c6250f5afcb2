"""The modes of fuzzing: who troubles whom, at full speed or at a pace, and whom instead when a sink takes it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from shared.config.settings.endpoints import KEY_MARK
from tests.support.fuzz.fuzz_cluster import FuzzCluster
from tests.support.fuzz.fuzz_hammer import MIB, Aim
from tests.support.fuzz.fuzz_http import HttpOutsider
from tests.support.fuzz.fuzz_node import FuzzNode, NodeAim
from tests.support.fuzz.fuzz_outsider import Outsider
from tests.support.fuzz.fuzz_sink import Sink
from tests.support.fuzz.fuzz_tickets import TicketForger

NODES = {"node": FuzzNode, "tickets": TicketForger}
MODES = (*NODES, "outsider", "http")
MESSAGES_PER_S = 300.0
BYTES_PER_S = 4.0 * MIB  # of each thread of an outsider


class Fuzzer(Protocol):
    """A source of fuzzing: a node of the cluster, or the threads of an outsider."""

    counts: Counter[str]

    @property
    def has_stopped(self) -> bool: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Mode:
    """A fuzzer and its targets. `node`: the fuzzer if it is a node of the cluster; its requests may fail."""

    fuzzer: Fuzzer
    node: FuzzNode | None
    full: object
    sides: dict[str, object]  # at a pace: target, sink

    def aim(self, aim: object) -> None:
        self.fuzzer.aim(aim)  # type: ignore[attr-defined]

    def sent_bytes(self) -> int:
        return self.node.counts["bytes"] if self.node is not None else self.fuzzer.sent_bytes  # type: ignore[attr-defined]


@contextlib.contextmanager
def open_mode(name: str, cluster: FuzzCluster, seed: int) -> Iterator[Mode]:
    """Start a fuzzer at full speed. Stop it at the end, and raise what its threads raised."""
    kind = {"outsider": "zmtp", "http": "http"}.get(name, "zmq")
    with Sink(kind, cluster.keys if cluster.has_keys else None) as sink:
        mode = _node_mode(name, cluster, sink, seed) if name in NODES else _outsider_mode(name, cluster, sink, seed)
        try:
            yield mode
        finally:
            mode.fuzzer.stop()


def _node_mode(name: str, cluster: FuzzCluster, sink: Sink, seed: int) -> Mode:
    routers, nodes = (cluster.routers[0].nodes,), cluster.named_nodes()
    mark = f"{KEY_MARK}{cluster.servers()[routers[0]].hex()}" if cluster.has_keys else ""
    target = NodeAim(routers, nodes, MESSAGES_PER_S)
    instead = NodeAim((sink.endpoint,), dict.fromkeys(nodes, sink.endpoint + mark), MESSAGES_PER_S)
    fuzzer = cluster.fuzz(seed, NODES[name])
    return Mode(fuzzer, fuzzer, NodeAim(routers, nodes), {"target": target, "sink": instead})


def _outsider_mode(name: str, cluster: FuzzCluster, sink: Sink, seed: int) -> Mode:
    endpoints = [cluster.url] if name == "http" else [cluster.routers[0].nodes, *cluster.node_endpoints()]
    instead = [sink.url] if name == "http" else [sink.endpoint]
    sides = {"target": Aim(endpoints, BYTES_PER_S), "sink": Aim(instead, BYTES_PER_S)}
    if name == "http":
        fuzzer: HttpOutsider | Outsider = HttpOutsider(cluster.url, cluster.api_key, seed)
    else:
        fuzzer = Outsider(endpoints, cluster.servers(), seed)
    return Mode(fuzzer, None, Aim(endpoints), sides)
