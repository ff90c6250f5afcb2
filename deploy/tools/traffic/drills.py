"""Drain, restart or kill a node during a load."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from deploy.cluster.admin import AdminClient
from deploy.tools.traffic.target import Server
from shared.core.errors import ConfigError

HERE = ("127.0.0.1", "localhost", "::1")
FORM = re.compile(r"(kill|drain|restart):([^@]+)@([0-9.]+)s?")
NOTICED_S = 3.0  # in this time a router should notice a killed node
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Planned:
    kind: str
    node: str
    at_s: float


def parse_drill(text: str) -> Planned:
    match = FORM.fullmatch(text)
    try:
        at_s = float(match[3]) if match else -1.0
    except ValueError:
        at_s = -1.0
    if match is None or at_s < 0:
        raise ConfigError(f"--drill is {text!r}; it must look like kill:decode-1@20, drain:... or restart:...")
    return Planned(match[1], match[2], at_s)


def prepare(planned: Planned, server: Server, admin_key: str) -> Callable[[], object]:
    """Return the drill's action. Raise ConfigError if the drill can't work."""
    if planned.node not in ready_nodes(server):
        known = ", ".join(sorted(ready_nodes(server))) or "none"
        raise ConfigError(f"--drill: {server.url} has no ready node {planned.node!r}; ready are {known}")
    if planned.kind == "kill":
        if server.url.host not in HERE:
            raise ConfigError(f"--drill kill: {server.url.host} is not this machine; drain and restart work anywhere")
        victim = find_process(planned.node, server.url.port)
        return lambda: kill(victim)
    admin = AdminClient(server.url, admin_key, server.ca)
    admin.status()
    then = "stop" if planned.kind == "drain" else "restart"
    return lambda: admin.call("POST", "/admin/drain", {"node": planned.node, "then": then})


def find_process(node: str, router_port: int) -> psutil.Process:
    """Return this user's process that has this node id and is connected to the router.

    Raise ConfigError unless exactly one process matches.
    """
    own = psutil.Process().uids().real
    named = [process for process in psutil.process_iter(["cmdline", "uids"]) if is_node(process.info, node, own)]
    ports = ports_beside(router_port)
    found = [process for process in named if ports & peer_ports(process)]
    if len(found) != 1:
        pids = ", ".join(str(process.pid) for process in named) or "none"
        raise ConfigError(
            f"--drill kill: exactly one process of this machine must be the router's {node}; "
            f"processes of that name: {pids}, connected to it: {len(found)}"
        )
    return found[0]


def ports_beside(port: int) -> set[int]:
    """Return all TCP ports on which the router at `port` listens. Nodes dial one of these ports."""
    listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.pid]
    owners = {one.pid for one in listening if one.laddr.port == port}
    return {int(one.laddr.port) for one in listening if one.pid in owners}


def peer_ports(process: psutil.Process) -> set[int]:
    try:
        return {int(one.raddr.port) for one in process.net_connections("tcp") if one.raddr}
    except psutil.Error:
        return set()


def is_node(info: dict[str, object], node: str, own_uid: int) -> bool:
    argv, uids = info.get("cmdline"), info.get("uids")
    if not isinstance(argv, list) or getattr(uids, "real", None) != own_uid:
        return False
    return has_node_id(argv, node) and any(role in argv for role in ("prefill", "decode"))


def has_node_id(argv: Sequence[str], node: str) -> bool:
    pairs = zip(argv, argv[1:], strict=False)
    return f"--node-id={node}" in argv or ("--node-id", node) in pairs


def kill(victim: psutil.Process) -> None:
    """Kill the victim, unless its process id was reused."""
    if victim.is_running():
        os.kill(victim.pid, signal.SIGKILL)


def ready_nodes(server: Server) -> set[str]:
    _, body = server.get("/ready")
    try:
        return {str(row["node"]) for row in json.loads(body)["nodes"] if row["ready"]}
    except (ValueError, LookupError, TypeError):
        return set()


def take_away(planned: Planned, action: Callable[[], object], server: Server, limit_s: float) -> float:
    """Return the seconds until the node serves again; NaN if it is late or drained."""
    action()
    return math.nan if planned.kind == "drain" else wait_back(planned.node, server, limit_s)


def wait_back(node: str, server: Server, limit_s: float) -> float:
    """Return the seconds until the node is back; NaN beyond `limit_s`.

    At first the router may show the earlier state. So a ready node counts as back only after a poll that found it not
    ready, or after NOTICED_S.
    """
    begin = time.monotonic()
    was_away = False
    while (waited := time.monotonic() - begin) <= limit_s:
        is_ready = node in ready_nodes(server)
        was_away |= not is_ready
        if is_ready and (was_away or waited >= NOTICED_S):
            return waited
        time.sleep(POLL_S)
    return math.nan
