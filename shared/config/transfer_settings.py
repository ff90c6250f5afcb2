"""How KV pages travel between nodes: settings of their own, beside which transport it is (settings.NodeConfig)."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.endpoints import UNPROVEN, UNPROVEN_NETWORK, is_loopback
from shared.config.options import check_fields, option
from shared.config.settings import NodeConfig
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How KV pages travel between nodes, whatever carries them."""

    layer_parts: int = option(
        1,
        "a chunk's KV pages travel in so many parts, layer by layer while later layers are computed; 1: whole pages",
        low=1,
        high=64,
    )
    trust_network: bool = option(
        False, "let KV pages go through gloo, nccl or nixl, whose connections neither prove who is there nor encrypt"
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def check_transport(self, node: NodeConfig) -> None:
        """ConfigError for one that needs a network that is trusted, where nobody said so."""
        if node.transport in UNPROVEN and not is_loopback(node.bind_host) and not self.trust_network:
            raise ConfigError(f"--transport {node.transport} and --bind-host {node.bind_host!r}: {UNPROVEN_NETWORK}")
