"""Settings of the router's HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.options import check_fields, option
from shared.config.settings.settings import KIB, MIB
from shared.core.errors import ConfigError

ANY = "*"


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The web pages that may use the HTTP API, limits on its connections, and their encryption."""

    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host header to allow besides this machine's names, for proxies that pass on the clients' header; repeat for "
        "several, * for all. Others get 421, so that a web page whose name leads to 127.0.0.1 can't read answers",
        metavar="NAME",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "origin of web pages that may use the API from a browser, e.g. http://localhost:3000; repeat for several, * "
        "for all. Pages of other origins can't read answers, and their requests with a form or plain text get 415",
        metavar="ORIGIN",
    )
    max_header_bytes: int = option(
        32 * KIB, "size limit of a request's line and headers; more gets 431", low=KIB, is_bytes=True, metavar="SIZE"
    )
    max_headers: int = option(100, "largest number of headers in a request; more get 431", low=8, high=10_000)
    header_timeout_s: float = option(
        10.0, "longest time for a request's line and headers; then the connection is closed", low=0.1, high=3600.0
    )
    keep_alive_s: int = option(
        150,
        "how long an idle connection stays open; must be longer than clients and proxies keep theirs (Go and Traefik: "
        "90 s, Caddy: 120 s), else they send requests into closed connections. The header Keep-Alive announces it",
        low=1,
        high=86_400,
    )
    max_connections: int = option(2048, "largest number of open connections; further ones get 503", low=1, high=1 << 20)
    max_bodies_bytes: int = option(
        64 * MIB,
        "limit on the total size of request bodies that are being read or parsed; further requests get 503",
        low=KIB,
        is_bytes=True,
        metavar="SIZE",
    )
    max_json_depth: int = option(
        128, "how deep lists and objects in a body may be nested; a deeper body gets 400", low=8, high=900
    )
    tls_cert: str = option(
        "",
        "PEM file with the certificate of the HTTP API, and those of its issuers: it then speaks HTTPS only; read "
        "again when it changes",
        metavar="FILE",
    )
    tls_key: str = option("", "PEM file with the key of --tls-cert, without a passphrase", metavar="FILE")
    plain_http: bool = option(
        False, "serve other machines without TLS, where a proxy or the network encrypts; keys travel unencrypted"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.allowed_hosts:
            if not name or "/" in name or name != name.strip():
                raise ConfigError(f"--allowed-hosts is {name!r}; write a host name without a scheme, or *")
        for origin in self.cors_origins:
            if origin != ANY and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise ConfigError(f"--cors-origins is {origin!r}; write an origin as http://localhost:3000, or *")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key belong together: give both or none")
        if self.has_tls and self.plain_http:
            raise ConfigError("--plain-http contradicts --tls-cert: leave out one of them")

    @property
    def has_tls(self) -> bool:
        return bool(self.tls_cert)

    @property
    def scheme(self) -> str:
        return "https" if self.has_tls else "http"
