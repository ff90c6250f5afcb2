"""Settings of `baton ray up`, and two variables that Ray reads when it is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shared.config.settings.options import Settings, check_fields, option
from shared.core.errors import ConfigError

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # with "0", Ray keeps the address 127.0.0.1


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The Ray cluster, and how many routers and nodes to start on it."""

    address: str = option(
        "", "GCS address of a running Ray cluster, e.g. 10.0.0.1:6379, or auto; empty: start Ray on this machine only"
    )
    cluster: str = option("baton", "name of this cluster; several clusters may share one Ray cluster", metavar="NAME")
    working_dir: str = option("", "checkout to ship to machines without Baton; empty: machines have it", metavar="DIR")
    routers: int = option(1, "number of routers, all for the same nodes, at --port, --port + 1, ...", low=1)
    prefill: int = option(1, "number of prefill nodes at the start; there are never fewer", low=0, high=1024)
    decode: int = option(1, "number of decode nodes at the start; there are never fewer", low=0, high=1024)
    start_timeout_s: float = option(300.0, "longest time until everything is ready", low=1.0, high=3600.0)
    max_restarts: int = option(5, "restarts of one node within a minute before it stays down", low=0, high=100)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prefill + self.decode == 0:
            raise ConfigError("[ray] prefill = 0 and decode = 0 leave no node; start at least one")
        if not self.cluster.replace("-", "").replace("_", "").isalnum() or len(self.cluster) > 48:
            raise ConfigError(f"[ray] cluster is {self.cluster!r}; letters, digits, - and _, at most 48")


@dataclass(frozen=True, slots=True)
class ShareConfig(Settings):
    """What each router and node reserves of its machine."""

    router_cpus: float = option(1.0, "cores that a router reserves", low=0.0, high=1024.0)
    prefill_cpus: float = option(1.0, "cores that a prefill node reserves and runs on, one thread per core", low=0.1)
    decode_cpus: float = option(1.0, "cores that a decode node reserves and runs on, one thread per core", low=0.1)
    prefill_gpus: float = option(0.0, "part of a GPU that a prefill node reserves, e.g. 0.5", low=0.0, high=1.0)
    decode_gpus: float = option(
        0.0, "part of a GPU that a decode node reserves; if both are 0: one GPU for each node, if Ray has any",
        low=0.0, high=1.0,
    )  # fmt: skip

    @property
    def has_gpus(self) -> bool:
        return self.prefill_gpus > 0 or self.decode_gpus > 0


@dataclass(frozen=True, slots=True)
class ScalingConfig(Settings):
    """The conditions under which Baton adds a node to a role, or removes one.

    Without a maximum, a role keeps as many nodes as at the start.
    """

    max_prefill: int = option(0, "largest number of prefill nodes; 0: as many as at the start", low=0, high=1024)
    max_decode: int = option(0, "largest number of decode nodes; 0: as many as at the start", low=0, high=1024)
    busy_rows: float = option(0.8, "a role is full if this share of its rows or KV pages is in use", low=0.05, high=1.0)
    busy_waiting: float = option(4.0, "a role is full if this number of requests per node waits", low=0.1)
    slo_ttft_ms: float = option(0.0, "mean time to first token above which prefill grows; 0: no limit", low=0.0)
    slo_itl_ms: float = option(0.0, "mean time between tokens above which decode grows; 0: no limit", low=0.0)
    up_after_s: float = option(15.0, "seconds for which a role must be full before it grows", low=0.0, high=3600.0)
    down_after_s: float = option(180.0, "seconds for which a role could spare a node before it shrinks", low=0.0)
    settle_s: float = option(30.0, "shortest time, in seconds, between two changes of one role", low=0.0, high=3600.0)


def is_local(address: str) -> bool:
    return not address or address.rpartition(":")[0] in ("127.0.0.1", "localhost")


def environment(address: str) -> dict[str, str]:
    """Return Ray's variables, including one that turns usage reports off."""
    loopback = {LOOPBACK_ONLY: "0"} if is_local(address) else {}
    return loopback | {"RAY_USAGE_STATS_ENABLED": "0"}


def apply(address: str) -> None:
    """Set Ray's variables in this process, before `import ray`."""
    os.environ.update(environment(address))  # noqa: TID251


def inherited() -> dict[str, str]:
    return dict(os.environ)  # noqa: TID251
