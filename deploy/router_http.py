"""Send a command's requests to a router, and read the keys for these requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.router_url import Url, no_answer
from shared.core.errors import ConfigError
from shared.wire.keys.http_keys import read_key
from shared.wire.keys.private_file import read_private

HTTP_TIMEOUT_S = 10.0
NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME, which Python does not name
UNREACHABLE = (OSError, http.client.HTTPException)


class RouterHttp:
    """Send requests to a router, or to its proxy, each over a new connection.

    `key`: sent as a bearer token. `other_key`: sent as x-api-key. `ca`: the file of a CA unknown to the system.
    """

    def __init__(
        self, url: Url, key: str, ca: Path | None = None, timeout_s: float = HTTP_TIMEOUT_S, other_key: str = ""
    ) -> None:
        if not (key + other_key).isascii() or not (key + other_key).isprintable():
            raise ConfigError("the key is not one line of plain characters: is it the right file?")
        self.url = url
        self._timeout_s = timeout_s
        self._tls = make_tls(ca) if url.scheme == "https" else None
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._headers |= {"x-api-key": other_key} if other_key else {}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Return (status, body). Raise an error of a class in UNREACHABLE if no answer comes."""
        data = json.dumps(body).encode() if body else None
        return self.send(method, path, data, self._timeout_s)

    def require_answer(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """As `ask`. Raise ConfigError if no answer comes."""
        try:
            return self.ask(method, path, body)
        except UNREACHABLE as error:
            raise no_answer(self.url, error) from None

    def send(self, method: str, path: str, data: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        with self._opened(method, path, data, timeout_s) as answer:
            return answer.status, answer.read()

    def opened(
        self, method: str, path: str, body: dict[str, Any], timeout_s: float
    ) -> contextlib.AbstractContextManager[http.client.HTTPResponse]:
        """Yield an answer that is still to be read. Leaving it early closes the connection."""
        return self._opened(method, path, json.dumps(body).encode(), timeout_s)

    @contextlib.contextmanager
    def _opened(
        self, method: str, path: str, data: bytes | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection(timeout_s)
        kind = {"content-type": "application/json"} if data else {}
        try:
            connection.request(method, self.url.prefix + path, data, self._headers | kind)
            yield connection.getresponse()
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


def own_connection(host: str, port: int, cert: str, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to a router that this command started. `cert`: its --tls-cert; "": it speaks plain HTTP.

    The certificate may be for other names than `host`, and may have expired, but must be the one in this file."""
    if not cert:
        return http.client.HTTPConnection(host.strip("[]"), port, timeout=timeout_s)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    tls.load_verify_locations(Path(cert).expanduser())
    return http.client.HTTPSConnection(host.strip("[]"), port, timeout=timeout_s, context=tls)


def read_api_key(path: Path | None) -> str:
    """Return "" without --api-key-file. Raise ConfigError for a file that others may read."""
    return read_key(str(path or ""), "--api-key-file")


def seers_key(api_key_file: str, admin_key_file: str) -> str:
    """Return the key that a router wants before it shows its nodes; "" if it wants none.

    If the clients' key file is a bare key, return that key. A table of tenants holds only hashes, so return the
    operators' key instead. Raise ConfigError if that is a table too.
    """
    # imported here, because `--help` does not need it
    from router.tenants.keys_file import FLAG, MAX_FILE_BYTES, bare_key

    if not api_key_file:
        return ""
    try:
        key = bare_key(read_private(Path(api_key_file).expanduser(), MAX_FILE_BYTES))
    except ConfigError as error:
        raise ConfigError(f"{FLAG}: {error.message}") from None
    path, flag = (admin_key_file, "--admin-key-file") if key is None else (api_key_file, FLAG)
    return read_key(path, flag)


def error_message(body: bytes) -> str:
    """Return what an error's body says, or "" if it says nothing in OpenAI's form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""


def printable(text: str) -> str:
    """Escape what moves a terminal's cursor or ends a line: a server or a forger chose these words."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
