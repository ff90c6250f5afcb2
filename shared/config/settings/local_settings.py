"""Settings of `baton up`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.config.settings.options import check_fields, option
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """The processes that `baton up` starts on this machine, and how it watches them."""

    routers: int = option(1, "number of routers, all for the same nodes, at --port, --port + 1, ...", low=1, high=64)
    prefill: int = option(
        -1,
        "number of prefill nodes; 0: decode nodes also prefill; -1: 0 if the GPUs are enough for one node, else 1",
        low=-1,
        high=64,
    )
    decode: int = option(1, "number of decode nodes; 0: prefill nodes also decode", low=0, high=64)
    devices: tuple[int, ...] = option(
        (),
        "a GPU for each node, or for each of its ranks, prefill nodes first, e.g. 0,1,4: CUDA's numbers, within "
        "CUDA_VISIBLE_DEVICES if it is set. Nodes share a GPU whose number occurs several times. none: the first GPUs",
        metavar="LIST",
    )
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
        if self.prefill == self.decode == 0:
            raise ConfigError("--prefill 0 --decode 0 leaves no node; start at least one")
        if any(number < 0 for number in self.devices):
            raise ConfigError(f"--devices is {self.named_devices}; GPUs are numbered from 0")

    @property
    def named_devices(self) -> str:
        return ",".join(map(str, self.devices))

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode

    @property
    def node_names(self) -> list[str]:
        roles = (("prefill", self.prefill), ("decode", self.decode))
        return [f"{role}-{index}" for role, number in roles for index in range(number)]

    @property
    def named_nodes(self) -> str:
        return f"--prefill {self.prefill} --decode {self.decode}"

    def on_gpus(self, num_gpus: int, tp: int = 1) -> LocalConfig:
        """Return the settings with a number of prefill nodes. `num_gpus`: GPUs to deal; 0 if nodes are on the CPU.

        `tp`: GPUs of a node."""
        alone = self.decode > 0 and 0 < num_gpus < 2 * tp
        return self if self.prefill >= 0 else replace(self, prefill=0 if alone else 1)
