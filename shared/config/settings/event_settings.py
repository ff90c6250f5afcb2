"""Settings of the events by which programs outside the cluster follow a node."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.endpoints import MAX_PORT, is_loopback
from shared.config.settings.options import check_fields, option
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """KV events, in the format of vLLM's: which prompts' pages a node has. They hold the token ids of prompts and
    answers."""

    kv_events_endpoint: str = option(
        "",
        "where programs subscribe to KV events, e.g. tcp://127.0.0.1:5557. Any program that reaches it gets "
        "the token ids of all cached prompts, so other addresses than loopback need --trust-network; empty: no events",
        metavar="ENDPOINT",
    )
    kv_events_topic: str = option("", "topic of the KV events; empty: kv@NODE@MODEL", metavar="TEXT")

    def __post_init__(self) -> None:
        """Raise ConfigError for an address that is none."""
        check_fields(self)
        if not self.kv_events_endpoint:
            return
        host, _, port = self.kv_events_endpoint.removeprefix("tcp://").rpartition(":")
        has_port = port.isdigit() and int(port) <= MAX_PORT
        if not (self.kv_events_endpoint.startswith("tcp://") and host and has_port):
            raise ConfigError(
                f"--kv-events-endpoint is {self.kv_events_endpoint!r}; it must look like tcp://127.0.0.1:5557"
            )

    def check_reach(self, *, trusts_network: bool) -> None:
        """Raise ConfigError if other machines could subscribe, and the network is not said to be trusted."""
        host, _, _ = self.kv_events_endpoint.removeprefix("tcp://").rpartition(":")
        if host and not is_loopback(host) and not trusts_network:
            raise ConfigError(
                f"--kv-events-endpoint is {self.kv_events_endpoint!r}: its connections neither identify peers nor "
                "encrypt, and events hold the token ids of prompts. If everybody who can reach this machine may read "
                "them, add --trust-network; else serve this machine only (127.0.0.1, ::1 or localhost)"
            )
