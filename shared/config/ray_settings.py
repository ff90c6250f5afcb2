"""What `baton ray up` adds to a cluster's settings: where Ray is, what a node takes of it, when roles grow and shrink.
And the two variables that Ray reads when it is loaded. Knows nothing of Ray beyond these names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shared.config.options import check_fields, option
from shared.core.errors import ConfigError

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # off: Ray keeps 127.0.0.1, which it replaces otherwise


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Where Ray is, and how many routers and nodes it starts."""

    address: str = option(
        "", "GCS address of a running Ray cluster, as 10.0.0.1:6379, or auto; empty: a fresh one on this machine only"
    )
    cluster: str = option("baton", "name of this cluster: several may share a Ray cluster", metavar="NAME")
    working_dir: str = option(
        "", "checkout to ship to machines that have no Baton installed; empty: it is installed", metavar="DIR"
    )
    routers: int = option(1, "routers over the same nodes, on --port, --port + 1, ...", low=1, high=16)
    prefill: int = option(1, "prefill nodes at the start, and never fewer", low=0, high=1024)
    decode: int = option(1, "decode nodes at the start, and never fewer", low=0, high=1024)
    start_timeout_s: float = option(300.0, "longest time until all of it is ready", low=1.0, high=3600.0)
    max_restarts: int = option(5, "restarts of one node within a minute before it is left down", low=0, high=100)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prefill + self.decode == 0:
            raise ConfigError("[ray] prefill = 0 and decode = 0 leave no node; start at least one")
        if not self.cluster.replace("-", "").replace("_", "").isalnum() or len(self.cluster) > 48:
            raise ConfigError(f"[ray] cluster is {self.cluster!r}; letters, digits, - and _, at most 48")


@dataclass(frozen=True, slots=True)
class ShareConfig:
    """What each router and node reserves of a machine."""

    router_cpus: float = option(1.0, "cores that a router reserves", low=0.0, high=1024.0)
    prefill_cpus: float = option(1.0, "cores that a prefill node reserves: its threads, and cores to stay on", low=0.1)
    decode_cpus: float = option(1.0, "cores that a decode node reserves: its threads, and cores to stay on", low=0.1)
    prefill_gpus: float = option(0.0, "GPUs that a prefill node reserves", low=0.0)
    decode_gpus: float = option(0.0, "GPUs that a decode node reserves", low=0.0)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """When a role gets a node more or a node less. Without a largest number it keeps the nodes it started with."""

    max_prefill: int = option(0, "most prefill nodes; 0: as many as at the start", low=0, high=1024)
    max_decode: int = option(0, "most decode nodes; 0: as many as at the start", low=0, high=1024)
    busy_rows: float = option(0.8, "share of a role's request rows in use that counts as full", low=0.05, high=1.0)
    busy_waiting: float = option(4.0, "waiting requests per node that count as full", low=0.1)
    slo_ttft_ms: float = option(0.0, "mean time to the first token to keep; beyond it prefill grows; 0: none", low=0.0)
    slo_itl_ms: float = option(0.0, "mean time between tokens to keep; beyond it decode grows; 0: none", low=0.0)
    up_after_s: float = option(15.0, "a role must be full for so long before it grows", low=0.0, high=3600.0)
    down_after_s: float = option(180.0, "a role must do with a node less for so long before it shrinks", low=0.0)
    settle_s: float = option(30.0, "between two changes of one role", low=0.0, high=3600.0)

    def __post_init__(self) -> None:
        check_fields(self)


def is_local(address: str) -> bool:
    """Whether this is a Ray cluster that lives on 127.0.0.1 alone: the one that is started here, or a test's."""
    return not address or address.rpartition(":")[0] in ("127.0.0.1", "localhost")


def environment(address: str) -> dict[str, str]:
    """For Ray's processes and for whoever loads it. No usage reports leave the machine either way."""
    loopback = {LOOPBACK_ONLY: "0"} if is_local(address) else {}
    return loopback | {"RAY_USAGE_STATS_ENABLED": "0"}


def apply(address: str) -> None:
    """For this process; before `import ray`."""
    os.environ.update(environment(address))


def inherited() -> dict[str, str]:
    """This process's own environment, for a child that gets something added."""
    return dict(os.environ)
