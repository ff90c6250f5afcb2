"""The server under load: where it is, what it is, which fields it understands. Asked before and after a run, never
during one. Knows nothing of load."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.parse
from dataclasses import dataclass
from typing import Any

from deploy.tools.load.connection import Address
from shared.core.errors import ConfigError

TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 3.0
MAX_SHOWN = 300
OURS = "baton"  # what our router says of its models


@dataclass(frozen=True, slots=True)
class Url:
    scheme: str
    host: str
    port: int
    prefix: str  # of the path, without /v1

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse_url(text: str) -> Url:
    parts = urllib.parse.urlsplit(text if "//" in text else f"http://{text}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise ConfigError(f"{text!r} is no address of a server; it must look like http://127.0.0.1:8000")
    return Url(parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


class Server:
    """Plain questions to it, one connection each."""

    def __init__(self, url: Url, api_key: str = "") -> None:
        self.url, self.api_key = url, api_key

    def get(self, path: str) -> tuple[int, bytes]:
        return self._call("GET", path, None, TIMEOUT_S)

    def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        return self._call("POST", path, body, timeout_s)

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """(status, body); ConfigError when nobody answers."""
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.url.host, self.url.port, timeout=timeout_s)
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, self.url.prefix + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"no answer from {self.url}: {error}; is a server running there?") from None
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Target:
    """`is_ours`: a Baton router, which shows token ids, takes ignore_eos and has metrics to compare with."""

    url: Url
    model: str
    is_ours: bool


def look_at(server: Server, model: str) -> Target:
    """`model` empty: the first one that the server names."""
    status, body = server.get("/v1/models")
    try:
        cards = list(json.loads(body)["data"]) if status == 200 else []
        named = {str(card["id"]): str(card.get("owned_by", "")) for card in cards}
    except (ValueError, LookupError, TypeError, AttributeError):
        named = {}
    if not model and not named:
        shown = " ".join(body[:MAX_SHOWN].decode("utf-8", "replace").split())
        raise ConfigError(f"{server.url}/v1/models names no model ({status} {shown}); say --model, or --api-key-file")
    chosen = model or next(iter(named))
    return Target(server.url, chosen, OURS in named.values())


def resolve(url: Url) -> Address:
    """The first address at which somebody answers (a name may stand for one where nobody does), else the first one;
    ConfigError for a name nobody knows."""
    try:
        found = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{url.host}: {error.strerror or error}") from None
    infos = [(family, sockaddr) for family, _, _, _, sockaddr in found]
    family, sockaddr = next((info for info in infos if answers(*info)), infos[0])
    return Address(family, sockaddr, url.host, ssl.create_default_context() if url.scheme == "https" else None)


def answers(family: socket.AddressFamily, sockaddr: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        return probe.connect_ex(sockaddr) == 0
