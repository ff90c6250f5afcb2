"""One question to a router over HTTP or HTTPS. Knows nothing of what is asked."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from deploy.router_url import Url
from shared.core.errors import ConfigError

HTTP_TIMEOUT_S = 10.0
UNREACHABLE = (OSError, http.client.HTTPException)


class RouterHttp:
    """`url`: of a router, or of a proxy before it. `ca`: a file with the authorities that https is checked against,
    where the system's do not know the certificate. `other_key`: the clients' beside the operators'."""

    def __init__(
        self, url: Url, key: str, ca: Path | None = None, timeout_s: float = HTTP_TIMEOUT_S, other_key: str = ""
    ) -> None:
        if not (key + other_key).isascii() or not (key + other_key).isprintable():
            raise ConfigError("the key is more than one line of plain letters: is it the right file?")
        self.url = url
        self._timeout_s = timeout_s
        self._tls = make_tls(ca) if url.scheme == "https" else None
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._headers |= {"x-api-key": other_key} if other_key else {}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """(status, body of the answer); one of UNREACHABLE where there is none."""
        data = json.dumps(body).encode() if body else None
        return self.send(method, path, data, self._timeout_s)

    def send(self, method: str, path: str, data: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """The same with a body that is JSON already."""
        connection = self._connection(timeout_s)
        kind = {"content-type": "application/json"} if data else {}
        try:
            connection.request(method, self.url.prefix + path, data, self._headers | kind)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self.url.host, self.url.port, timeout=timeout_s)
        return http.client.HTTPSConnection(self.url.host, self.url.port, timeout=timeout_s, context=self._tls)


def make_tls(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca {ca}: {error}") from None


def read_api_key(path: Path | None) -> str:
    """The key in --api-key-file; none without the flag."""
    try:
        return path.expanduser().read_text(encoding="ascii").strip() if path else ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from None


def clients_key(file: str) -> str:
    """The key that clients of a router with this setting send, "" for none. Which nodes there are is shown with it."""
    key = read_api_key(Path(file) if file else None)
    if not key.isprintable():
        raise ConfigError(f"--api-key-file {file} is more than one line of plain letters: is it the right file?")
    return key
