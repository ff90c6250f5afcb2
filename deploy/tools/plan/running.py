"""Compare a running cluster with the found layout, and list the changes. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.router_http import RouterHttp
from deploy.router_url import Url
from deploy.tools.plan.layout import ClusterLayout
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """The nodes' sorted names by role."""

    url: Url
    prefill: tuple[str, ...]
    decode: tuple[str, ...]


class ReadyNode(msgspec.Struct, frozen=True):
    node: str
    role: str


class ReadyNodes(msgspec.Struct, frozen=True):
    nodes: list[ReadyNode]


def look_at_cluster(url: Url, api_key: str, ca: Path | None = None) -> RunningCluster:
    """Raise ConfigError if no router answers."""
    _, body = RouterHttp(url, api_key, ca).require_answer("GET", "/ready")
    try:
        nodes = msgspec.json.decode(body, type=ReadyNodes).nodes
    except msgspec.MsgspecError:
        hint = "is it a router? (If it has a clients' key, give --api-key-file.)"
        raise ConfigError(f"the server at {url} names no nodes: {hint}") from None
    prefill, decode = (tuple(sorted(one.node for one in nodes if one.role == role)) for role in ("prefill", "decode"))
    return RunningCluster(url, prefill, decode)


def changes(cluster: RunningCluster, layout: ClusterLayout) -> Iterator[str]:
    runs = f"{cluster.url} runs {len(cluster.prefill)} prefill and {len(cluster.decode)} decode nodes"
    too_few = {"prefill": layout.prefill - len(cluster.prefill), "decode": layout.decode - len(cluster.decode)}
    if not any(too_few.values()):
        yield f"{runs}, as this layout wants."
        return
    yield f"{runs}; to get there:"
    names = {"prefill": list(cluster.prefill), "decode": list(cluster.decode)}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        while too_few[role] > 0 and too_few[other] < 0:
            yield f"  baton admin role {names[other].pop()} {role} {cluster.url}"
            too_few[role], too_few[other] = too_few[role] - 1, too_few[other] + 1
    for role, number in too_few.items():
        for _ in range(-number):
            yield f"  baton admin drain {names[role].pop()} {cluster.url}"
        if number > 0:
            yield f"  start {number} more: baton {role} --router ..."
