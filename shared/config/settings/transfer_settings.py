"""Settings of KV transfers, except the transport (settings.NodeConfig)."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.endpoints import UNPROVEN, UNPROVEN_NETWORK, is_loopback
from shared.config.settings.options import Settings, option
from shared.config.settings.settings import NodeConfig
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TransferConfig(Settings):
    """KV transfers between nodes, over any transport."""

    layer_parts: int = option(
        1,
        "number of parts in which a chunk's KV pages travel while later layers are computed; 1: whole pages",
        low=1,
        high=64,
    )
    trust_network: bool = option(
        False,
        "let KV pages go through gloo, nccl or nixl, and KV events leave this machine, over connections that neither "
        "identify peers nor encrypt",
    )

    def check_transport(self, node: NodeConfig) -> None:
        """Raise ConfigError if the transport needs --trust-network and the flag is not set."""
        if node.transport in UNPROVEN and not is_loopback(node.bind_host) and not self.trust_network:
            raise ConfigError(f"--transport {node.transport} and --bind-host {node.bind_host!r}: {UNPROVEN_NETWORK}")
