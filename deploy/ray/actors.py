"""Define the actors, one for each daemon, and find or make them. fleet.py decides what they do.

An actor has its daemon's name, outlives `baton ray up`, and exits when its daemon dies. Ray restarts actors without
limit.
"""

from __future__ import annotations

import http.client
import os
import secrets
import socket
import sys
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.child import describe_end
from deploy.cluster.local import STOP_MARGIN_S, spec
from deploy.cluster.ready import write_line
from deploy.ray import launch_plan as plan
from deploy.ray.keeper import Keeper
from deploy.ray.report import RUNNING, ActorPlace, ActorReport, Order, StartOrder, role_of
from deploy.router_http import own_connection, seers_key
from shared.config.core_plan import usable_cores
from shared.config.processes import NodeProcessConfig, RayClusterConfig
from shared.core.errors import ConfigError

BASE_GROUP = "at-start"
HTTP_TIMEOUT_S = 2.0
MAX_PAGE_BYTES = 16 << 20


class DaemonActor:
    """Start, watch and stop one router or node. `tend` does not block."""

    def __init__(self, name: str, stop_timeout_s: float) -> None:
        self._name = name
        self._life = secrets.token_hex(8)
        self._keeper = Keeper(
            log,
            lambda status: end_actor(f"its daemon {describe_end(status)}"),
            stop_timeout_s,
        )
        self._started: StartOrder | None = None

    def tend(self, order: Order | None) -> ActorReport:
        if isinstance(order, StartOrder):
            self._start(order)
        elif order is not None:
            self._keeper.stop()
        return self._report()

    def _start(self, order: StartOrder) -> None:
        if self._keeper.state != RUNNING:
            self._started = order
            self._keeper.start(spec(order.config, os.getpid()))

    def _report(self) -> ActorReport:
        state = self._keeper.state
        config = self._started.config if self._started is not None and state == RUNNING else None
        routers = config.parts.node.router if isinstance(config, NodeProcessConfig) else ()
        return ActorReport(
            name=self._name,
            life=self._life,
            place=place(),
            state=state,
            pid=self._keeper.pid,
            routers=routers,
            cores=config.cores.cpus if config is not None else (),
            words="" if state == RUNNING else self._keeper.words,
        )

    def page(self, path: str) -> str:
        """Return a page of the actor's router; "" on failure, or if the daemon is a node."""
        router = self._started.config if self._started is not None else None
        if router is None or isinstance(router, NodeProcessConfig):
            return ""
        own = router.router
        return get(own.host, own.port, path, (own.api_key_file, own.admin_key_file), router.http.tls_cert)


def log(line: str) -> None:
    """Write to Ray's log of this process."""
    write_line(line, sys.stdout)


def end_actor(why: object) -> None:
    """Exit, so that Ray restarts the actor. An exception would fail only the current call."""
    log(f"this actor ends: {why}")
    os._exit(1)


def place() -> ActorPlace:
    ip = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # half of ray has no types
    return ActorPlace(ip, socket.gethostname(), ray.get_runtime_context().get_node_id(), usable_cores())


def get(host: str, port: int, path: str, key_files: tuple[str, str], cert: str = "") -> str:
    """Return the page at `path`; "" on failure. `key_files`: the router's key files, for clients and for operators."""
    try:
        connection = own_connection(host, port, cert, HTTP_TIMEOUT_S)
    except OSError:
        return ""
    try:
        key = seers_key(*key_files)
        connection.request("GET", path, headers={"x-api-key": key} if key else {})
        return connection.getresponse().read(MAX_PAGE_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ConfigError):
        return ""
    finally:
        connection.close()


# ---- asking Ray for actors


def find_actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def find_group(name: str) -> PlacementGroup | None:
    try:
        found: PlacementGroup = get_placement_group(name)
    except ValueError:
        return None
    return found


def base_group(config: RayClusterConfig) -> PlacementGroup:
    """Return the initial processes' placement group. Ray spreads it over machines, and places all of it or nothing."""
    bundles = [plan.resources(config, name) for name in plan.names_at_start(config)]
    return find_group(BASE_GROUP) or placement_group(bundles, strategy="SPREAD", name=BASE_GROUP, lifetime="detached")


def own_group(config: RayClusterConfig, name: str) -> PlacementGroup:
    return find_group(name) or placement_group([plan.resources(config, name)], name=name, lifetime="detached")


def find_or_make(config: RayClusterConfig, name: str) -> Any:
    """Make a missing actor in its own bundle of a placement group."""
    found = find_actor(name)
    if found is not None:
        return found
    at_start = plan.names_at_start(config)
    if name in at_start:
        group, bundle = base_group(config), at_start.index(name)
    else:
        group, bundle = own_group(config, name), 0
    wanted = plan.resources(config, name)
    actor = ray.remote(DaemonActor).options(
        name=name,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=wanted.get("CPU", 0.0),
        num_gpus=wanted.get("GPU", 0.0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    )
    return actor.remote(name, stop_timeout_s(config, name))


def stop_timeout_s(config: RayClusterConfig, name: str) -> float:
    own = config.timeouts.shutdown_s if role_of(name) == "router" else config.nodes.node.drain_s
    return own + STOP_MARGIN_S


def names_here() -> list[str]:
    namespace = ray.get_runtime_context().namespace
    return [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == namespace]
