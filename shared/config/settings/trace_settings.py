"""Settings of each process's spans."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.config.settings.options import check_fields, option
from shared.core.errors import ConfigError
from shared.core.extras import require

SIGNAL_PATH = "/v1/traces"  # OTLP over HTTP has one path per signal


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Traces: spans of requests, for a collector that speaks OTLP over HTTP. They hold no prompts and no answers."""

    otlp_endpoint: str = option(
        "",
        "where spans go, e.g. http://127.0.0.1:4318 (/v1/traces is added to an address without a path); needs the "
        "extra `otel`; empty: no spans",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for an address that is none, or without the extra."""
        check_fields(self)
        if not self.otlp_endpoint:
            return
        if not is_http_url(self.otlp_endpoint):
            raise ConfigError(f"--otlp-endpoint is {self.otlp_endpoint!r}; it must be http://HOST:PORT or https://...")
        require("otel", "--otlp-endpoint")

    @property
    def traces_url(self) -> str:
        path = urlsplit(self.otlp_endpoint).path.rstrip("/")
        return self.otlp_endpoint if path else self.otlp_endpoint.rstrip("/") + SIGNAL_PATH


def is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        return False
