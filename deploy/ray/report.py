"""Messages between actors and manager: plain values, without Ray."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.processes import NodeProcessConfig, RouterProcessConfig

ROUTER, PREFILL, DECODE = "router", "prefill", "decode"
ROLES = (ROUTER, PREFILL, DECODE)

IDLE, RUNNING, STOPPED, DRAINED, FAILED = "idle", "running", "stopped", "drained", "failed"
AWAY = "away"  # the actor does not answer: Ray has not placed it, or is restarting it


def role_of(name: str) -> str:
    return name.rpartition("-")[0]


def index_of(name: str) -> int:
    return int(name.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """An actor's machine. `ray_node`: the machine's id in Ray. `cores`: the cores that the actor may use."""

    ip: str
    host: str
    ray_node: str
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ActorReport:
    """`life` changes with each restart of the actor. `words`: the last output lines of an ended daemon.

    `routers` and `cores`: what the running daemon was started with.
    """

    name: str
    life: str
    place: ActorPlace
    state: str
    pid: int = 0
    routers: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    words: str = ""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Start the daemon, unless it runs."""

    config: RouterProcessConfig | NodeProcessConfig


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Send SIGTERM. The daemon takes no new requests, finishes or hands over its open ones, and ends."""


Order = StartOrder | StopOrder


@dataclass(frozen=True, slots=True)
class StatusRow:
    name: str
    state: str
    machine: str = ""
    ray_node: str = ""
    pid: int = 0
    cores: tuple[int, ...] = ()
    restarts: int = 0
    words: str = ""
