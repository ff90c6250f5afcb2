"""Settings of `baton up`."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.options import check_fields, option
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """The processes that `baton up` starts on this machine, and how it watches them."""

    routers: int = option(1, "number of routers, all for the same nodes, at --port, --port + 1, ...", low=1, high=64)
    prefill: int = option(1, "number of prefill nodes; 0: decode nodes also prefill", low=0, high=64)
    decode: int = option(1, "number of decode nodes; 0: prefill nodes also decode", low=0, high=64)
    decode_tp: int = option(0, "--tp of the decode nodes; 0: the same as on prefill nodes", low=0, high=64)
    decode_pp: int = option(0, "--pp of the decode nodes; 0: the same as on prefill nodes", low=0, high=64)
    start_timeout_s: float = option(300.0, "longest time until everything is ready", low=1.0, high=3600.0)
    stop_timeout_s: float = option(
        15.0,
        "shortest time for processes to stop before they are killed; routers get at least --shutdown-s, nodes at least "
        "--drain-s",
        low=0.5,
        high=3600.0,
    )
    share_cores: bool = option(True, "let a node also compute on the cores of nodes without work")
    max_restarts: int = option(5, "restarts of one node within a minute before it stays down", low=0, high=100)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prefill + self.decode == 0:
            raise ConfigError("--prefill 0 --decode 0 leaves no node; start at least one")
