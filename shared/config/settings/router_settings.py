"""The router's settings, except those for text, HTTP and limits."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.endpoints import MAX_PORT, UNENCRYPTED, WITHOUT_KEYS, check_endpoint, is_loopback
from shared.config.settings.http_settings import HttpConfig
from shared.config.settings.options import check_fields, option
from shared.core.errors import ConfigError

BY_COST = -1  # value of local_prefill_tokens: choose a prompt's node by the measured cost
UNMEASURED_LOCAL_TOKENS = 32  # limit on local prompts, in tokens, until the cost is measured

POLICIES = ("prefix_aware", "least_load", "round_robin")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router's addresses, and its rule for choosing a pair of nodes."""

    host: str = option("127.0.0.1", "address of the HTTP API", metavar="HOST")
    port: int = option(8000, "port of the HTTP API", low=0, high=MAX_PORT)
    node_endpoint: str = option("tcp://127.0.0.1:7001", "address that nodes dial", metavar="ENDPOINT")
    policy: str = option("prefix_aware", "how a (prefill, decode) pair is picked", choices=POLICIES)
    router_id: str = option("", "name in keys and logs; empty: the name of its key, or a random one", metavar="NAME")
    local_prefill_tokens: int = option(
        BY_COST,
        "length limit, in tokens, of prompts that a decode node computes itself, without a hand-off; -1: it computes "
        "prompts whose hand-off was measured to cost more than it saves; until it is measured, prompts of up to "
        f"{UNMEASURED_LOCAL_TOKENS} tokens",
        low=BY_COST,
    )
    pull_prefixes: str = option(
        "on",
        "whether a prefill node may copy cached pages of a prompt from another prefill node if measurements say that "
        "this is faster than computing them",
        choices=("on", "off"),
    )
    api_key_file: str = option(
        "",
        "file with the key that clients must send as bearer token, or with tenants and the hashes of their keys (made "
        "by `baton keys tenant`); read again when it changes; empty: no key",
        metavar="FILE",
    )
    admin_key_file: str = option(
        "",
        "file with the key for /admin, or with operators, their rights and the hashes of their keys (made by `baton "
        "keys admin`); read again when it changes; empty: /admin is off (`baton up` makes a file with one key)",
        metavar="FILE",
    )
    strict_fields: bool = option(
        False,
        "refuse unknown fields of requests, numbers that are sent as texts, and a max_tokens that does not fit after "
        "the prompt; else response headers name the fields, and the lowered limit",
    )
    unsupported_parts: str = option(
        "placeholder",
        "images, audio and files without text in a conversation; placeholder: in earlier turns and in tools' results "
        "the model reads a placeholder for them, and in the newest message they are refused; refuse: they always are",
        choices=("placeholder", "refuse"),
    )
    admin_without_key: bool = option(False, "let every client of the API drain nodes and change roles")

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.router_id) > 64:
            raise ConfigError("--router-id must have at most 64 characters")

    def check_addresses(self, http: HttpConfig, *, has_keys: bool) -> None:
        """Raise ConfigError if an address needs keys or encryption and there is none."""
        check_endpoint(self.node_endpoint, "--node-endpoint", has_keys=has_keys)
        if is_loopback(self.host):
            return
        if not (http.has_tls or http.plain_http):
            raise ConfigError(f"--host is {self.host!r}: {UNENCRYPTED}")
        if not self.api_key_file:
            raise ConfigError(f"--host is {self.host!r}: {WITHOUT_KEYS}")
        if self.admin_without_key:
            raise ConfigError(f"--host is {self.host!r}: other machines can reach it; leave out --admin-without-key")
