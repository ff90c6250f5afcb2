"""What the actors and their manager tell each other. Plain values; knows nothing of Ray and of processes."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.processes import NodeProcessConfig, RouterProcessConfig

ROUTER, PREFILL, DECODE = "router", "prefill", "decode"
ROLES = (ROUTER, PREFILL, DECODE)

IDLE, RUNNING, STOPPED, DRAINED, FAILED = "idle", "running", "stopped", "drained", "failed"
AWAY = "away"  # said of an actor that does not answer: Ray has not placed it yet, or starts it again


def role_of(name: str) -> str:
    return name.rpartition("-")[0]


def index_of(name: str) -> int:
    return int(name.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor lives: the address that others reach its machine at, the machine's own name, Ray's id for it,
    the cores that the actor may use."""

    ip: str
    host: str
    ray_node: str
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ActorReport:
    """One actor's. `life` differs after each restart of the actor; `words`: its daemon's last lines, when it failed;
    `routers` and `cores` are what the running daemon was started with."""

    name: str
    life: str
    place: Place
    state: str
    pid: int = 0
    routers: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    words: str = ""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """An actor whose daemon runs already takes no notice."""

    config: RouterProcessConfig | NodeProcessConfig


@dataclass(frozen=True, slots=True)
class StopOrder:
    """SIGTERM: the daemon takes nothing new, finishes or hands over what it has, and ends."""


Order = StartOrder | StopOrder


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One line of `baton ray status`."""

    name: str
    state: str
    machine: str = ""
    ray_node: str = ""
    pid: int = 0
    cores: tuple[int, ...] = ()
    restarts: int = 0
    words: str = ""
