"""The server under load: its address, kind and model."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.router_http import UNREACHABLE, RouterHttp, make_tls
from deploy.router_url import Url, no_answer
from deploy.tools.traffic.connection import Address
from shared.core.errors import ConfigError

TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 3.0
MAX_SHOWN = 300
OURS = "baton"  # `owned_by` of our router's models


class Server:
    def __init__(self, url: Url, api_key: str = "", ca: Path | None = None) -> None:
        self.url, self.api_key, self.ca = url, api_key, ca
        self._http = RouterHttp(url, api_key, ca)

    def get(self, path: str) -> tuple[int, bytes]:
        return self._call("GET", path, None, TIMEOUT_S)

    def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        return self._call("POST", path, body, timeout_s)

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        try:
            return self._http.send(method, path, body, timeout_s)
        except UNREACHABLE as error:
            raise no_answer(self.url, error) from None


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `is_ours`: a Baton router, which shows token ids, takes ignore_eos and has our metrics.

    `owner`: who owns the model by /v1/models; "" if unknown.
    """

    url: Url
    model: str
    is_ours: bool
    owner: str = ""


def look_at(server: Server, model: str) -> Target:
    """Find out the server's kind. Without `model`, take the server's first model. Raise ConfigError if the server names
    none."""
    status, body = server.get("/v1/models")
    try:
        cards = list(json.loads(body)["data"]) if status == 200 else []
        named = {str(card["id"]): str(card.get("owned_by", "")) for card in cards}
    except (ValueError, LookupError, TypeError, AttributeError):
        named = {}
    if not model and not named:
        shown = " ".join(body[:MAX_SHOWN].decode("utf-8", "replace").split())
        raise ConfigError(f"{server.url}/v1/models names no model ({status} {shown}); give --model or --api-key-file")
    chosen = model or next(iter(named))
    return Target(server.url, chosen, OURS in named.values(), named.get(chosen, ""))


def resolve(url: Url, ca: Path | None = None) -> Address:
    """Return the host's first address that answers; its first if none does. `ca`: the file of a CA unknown to the
    system. Raise ConfigError for unknown hosts."""
    try:
        found = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{url.host}: {error.strerror or error}") from None
    infos = [(family, sockaddr) for family, _, _, _, sockaddr in found]
    family, sockaddr = next((info for info in infos if answers(*info)), infos[0])
    return Address(family, sockaddr, url.host, make_tls(ca) if url.scheme == "https" else None)


def answers(family: socket.AddressFamily, sockaddr: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        return probe.connect_ex(sockaddr) == 0
