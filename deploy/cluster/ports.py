"""Find free ports for the routers of `baton up`."""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import replace

from shared.config.processes import ClusterConfig
from shared.config.settings.endpoints import MAX_PORT
from shared.config.settings.router_settings import RouterConfig
from shared.core.errors import ConfigError


def deal_routers(config: ClusterConfig) -> tuple[RouterConfig, ...]:
    """Give each router a name, a port for nodes and a free HTTP port."""
    host, first, used = config.router.host, config.router.port, set[int]()
    if first + config.local.routers - 1 > MAX_PORT:
        raise ConfigError(f"--port {first}: ports end at {MAX_PORT}, and each router has one of its own")
    dealt = []
    for index, name in enumerate(config.router_names):
        port = first + index if first else free_port(host, used)
        if first:
            require_free(host, port)
        endpoint = f"tcp://127.0.0.1:{free_port('127.0.0.1', used | {port})}"
        used |= {port, int(endpoint.rpartition(":")[2])}
        dealt.append(replace(config.router, router_id=name, port=port, node_endpoint=endpoint))
    return tuple(dealt)


def bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host.strip("[]"), port))
    except OSError:
        probe.close()
        raise
    return probe


def free_port(host: str, used: Collection[int] = ()) -> int:
    while True:
        with bound(host, 0) as probe:
            port = int(probe.getsockname()[1])
        if port not in used:
            return port


def require_free(host: str, port: int) -> None:
    try:
        bound(host, port).close()
    except PermissionError:
        raise ConfigError(f"--port {port}: this user may not serve on it; choose one above 1023") from None
    except OSError as error:
        raise ConfigError(
            f"--port {port}: can't serve on {host}:{port} ({error.strerror}); "
            "stop what runs there (another baton?) or choose another with --port"
        ) from None
