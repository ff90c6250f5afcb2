"""One question to a router over HTTP or HTTPS. Knows nothing of what is asked."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from pathlib import Path
from typing import Any

from shared.core.errors import ConfigError

HTTP_TIMEOUT_S = 10.0
UNREACHABLE = (OSError, http.client.HTTPException)


class RouterHttp:
    """`base`: http://host:port, or https:// of a proxy before it, whose certificate is checked against `ca` (a file,
    where the system's authorities do not know it)."""

    def __init__(self, base: str, key: str, ca: Path | None = None, timeout_s: float = HTTP_TIMEOUT_S) -> None:
        try:
            parts = urllib.parse.urlsplit(base)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url is {base!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {base!r}; it must look like http://127.0.0.1:8000")
        if not key.isascii() or not key.isprintable():
            raise ConfigError("the admin key is more than one line of plain letters: is it the right file?")
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self._timeout_s = timeout_s
        self._tls = make_tls(ca) if parts.scheme == "https" else None
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """(status, body of the answer); one of UNREACHABLE where there is none."""
        connection = self._connection()
        try:
            connection.request(method, path, json.dumps(body) if body else None, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(self.host, self.port, timeout=self._timeout_s, context=self._tls)


def make_tls(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca {ca}: {error}") from None
