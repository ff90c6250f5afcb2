"""Facts for the doctor's checks: a cluster and a machine where all is well, to be changed field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from deploy.metrics_page import Page, parse_page
from deploy.tools.doctor.facts import Cluster, DaemonFacts, Disk, MachineFacts, ReadyFacts, SeenNode, Status
from shared.observe.metrics import ClusterMetrics, NodeReport, RequestMetrics, render
from shared.wire.messages import Fingerprint, Hello

NOW = 1_800_000_000.0
GIB = 1 << 30
FINGERPRINT = Fingerprint(3, 1, "m", "w", "bfloat16", 16, "k;v", "none", "0.1.0", "none")


def node(
    name: str, *, state: str = "ready", last_seen_s: float = 0.2, known_s: float = 100.0, **hello: Any
) -> SeenNode:
    """Fields of the fingerprint may stand among those of the Hello. It started 5 s before it said Hello."""
    own = {key: hello.pop(key) for key in list(hello) if key in Fingerprint.__struct_fields__}
    given = {
        "role": name.rstrip("0123456789-"),
        "node_id": name,
        "epoch": int((NOW - known_s - 5.0) * 1e6),
        "node_endpoint": f"tcp://127.0.0.1:70{len(name)}",
        "fingerprint": msgspec.structs.replace(FINGERPRINT, **own),
        "max_context": 2048,
        "max_running": 8,
        "host_id": "here",
        "transports": ["shm", "zmq"],
        "connection": 1,
        "adapters": [],
    }
    return SeenNode(state, last_seen_s, known_s, Hello(**(given | hello)))


def status(*nodes: SeenNode, **changes: Any) -> Status:
    """Of a router that is an hour old, asked by a machine whose clock is the same."""
    epoch = int((NOW - 3600.0) * 1000) << 16
    return replace(Status(NOW, epoch, "tcp://127.0.0.1:7001", nodes, NOW - 0.01, NOW + 0.01), **changes)


PAIR = (node("prefill-0"), node("decode-0"))
AT_REST = {"prefill-0": {}, "decode-0": {}}


def page(
    in_use: Mapping[str, Mapping[str, int]] = AT_REST,
    *,
    counters: Mapping[str, Mapping[str, float]] | None = None,
    handoffs: Mapping[str, Sequence[float]] | None = None,
    num_open: int = 0,
    num_done: int = 5,
    lost: int = 0,
) -> Page:
    """As our own router renders it: 100 pages a node, those not `in_use` (node -> page state -> pages) are free."""
    registry = CollectorRegistry()
    requests, nodes = RequestMetrics(registry), ClusterMetrics(registry)
    for _ in range(num_open + num_done):
        requests.started()
    for _ in range(num_done):
        requests.ended("stop", 0.1)
    for name, used in in_use.items():
        rows = {state: count for state, count in used.items() if state in ("running", "prefilling")}
        pages = {state: count for state, count in used.items() if state not in rows}
        pages = {"free": 100 - lost - sum(pages.values())} | pages
        seen = {"handoff_seconds": (handoffs or {}).get(name, ())}
        own = (counters or {}).get(name, {})
        nodes.update(NodeReport(name, name[:-2], 1, 100, pages, {"free": 8} | rows, 0, 1, own, seen))
    return parse_page(render(registry).decode())


def cluster(*nodes: SeenNode, **changes: Any) -> Cluster:
    nodes = nodes or PAIR
    given = Cluster("http://r", ReadyFacts(True, True, len(nodes), ()), page(), page(), 3.0, status(*nodes), "")
    return replace(given, **changes)


def machine(*daemons: DaemonFacts, **changes: Any) -> MachineFacts:
    given = MachineFacts(
        cores=(0, 1, 2, 3),
        num_cpus=4,
        load=1.0,
        steal_share=0.0,
        throttled_share=0.0,
        governors=frozenset({("acpi-cpufreq", "performance")}),
        daemons=daemons,
        memory_bytes=16 * GIB,
        available_bytes=8 * GIB,
        open_files=1 << 16,
        disks=(Disk("/tmp", 10 * GIB),),
    )
    return replace(given, **changes)
