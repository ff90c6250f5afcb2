"""Settings of the router's own, beside those of its text (text_settings.py) and its limits (settings.py)."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.endpoints import check_endpoint, check_http_host
from shared.config.options import check_fields, option
from shared.config.settings import MAX_PORT
from shared.core.errors import ConfigError

BY_COST = -1  # as local_prefill_tokens: what a prompt costs on either node decides
UNMEASURED_LOCAL_TOKENS = 32  # while that is not measured

POLICIES = ("prefix_aware", "least_load", "round_robin")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Where clients and nodes find the router, and how it picks a pair."""

    host: str = option("127.0.0.1", "address of the HTTP API", metavar="HOST")
    port: int = option(8000, "port of the HTTP API", low=0, high=MAX_PORT)
    node_endpoint: str = option("tcp://127.0.0.1:7001", "where nodes dial in", metavar="ENDPOINT")
    policy: str = option("prefix_aware", "how a (prefill, decode) pair is picked", choices=POLICIES)
    router_id: str = option("", "its own name, in keys and logs; empty: drawn, or that of its --keys", metavar="NAME")
    local_prefill_tokens: int = option(
        BY_COST,
        "prompts up to this many tokens go to a decode node alone, without a hand-off; -1: those whose hand-off costs "
        f"more than it saves, by what nodes measure, and up to {UNMEASURED_LOCAL_TOKENS} while nothing is measured",
        low=BY_COST,
    )
    api_key_file: str = option("", "file with the key clients must send as bearer token; empty: none", metavar="FILE")
    admin_key_file: str = option(
        "", "file with the key for /admin; empty: /admin is off (`baton up` makes one)", metavar="FILE"
    )
    strict_fields: bool = option(False, "refuse unknown fields of requests; else a response header names them")
    admin_without_key: bool = option(False, "let everybody who reaches the API drain nodes and change roles")

    def __post_init__(self) -> None:
        check_fields(self)
        check_http_host(self.host, "--host")
        if len(self.router_id) > 64:
            raise ConfigError("--router-id must have at most 64 characters")

    def check_addresses(self, *, has_keys: bool) -> None:
        """ConfigError for one that needs keys, where there are none."""
        check_endpoint(self.node_endpoint, "--node-endpoint", has_keys=has_keys)
