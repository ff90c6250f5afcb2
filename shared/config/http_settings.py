"""Settings of the HTTP server: what connections may take before a request is read, and what browsers may do."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.options import check_fields, option
from shared.config.settings import KIB, MIB
from shared.core.errors import ConfigError

ANY = "*"


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """What connections to the HTTP API may take, and which web pages may use it."""

    allowed_hosts: tuple[str, ...] = option(
        (),
        "host name that requests may be for (their Host header), where a proxy passes the clients' on; repeat for "
        "several, * for all; this machine's own names always may. Others get 421: a web page whose name was pointed "
        "at 127.0.0.1 then can't read answers",
        metavar="NAME",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "origin of web pages that may use the API from a browser, as http://localhost:3000; repeat for several, * for "
        "all. Without any no foreign page can read answers, and what it can send unasked (forms, plain text) gets 415",
        metavar="ORIGIN",
    )
    max_header_bytes: int = option(
        32 * KIB, "most bytes of a request's line and headers; beyond it 431", low=KIB, is_bytes=True, metavar="SIZE"
    )
    max_headers: int = option(100, "most headers of a request; beyond it 431", low=8, high=10_000)
    header_timeout_s: float = option(
        10.0, "a connection whose request line and headers are not there by then is hung up", low=0.1, high=3600.0
    )
    max_connections: int = option(2048, "connections open at a time; beyond it 503", low=1, high=1 << 20)
    max_bodies_bytes: int = option(
        64 * MIB,
        "most bytes of request bodies that are being read or parsed, all connections together; beyond it 503",
        low=KIB,
        is_bytes=True,
        metavar="SIZE",
    )
    max_json_depth: int = option(128, "lists and objects within one another in a body; beyond it 400", low=8, high=900)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.allowed_hosts:
            if not name or "/" in name or name != name.strip():
                raise ConfigError(f"--allowed-hosts is {name!r}; write a host name without a scheme, or *")
        for origin in self.cors_origins:
            if origin != ANY and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise ConfigError(f"--cors-origins is {origin!r}; write an origin as http://localhost:3000, or *")
