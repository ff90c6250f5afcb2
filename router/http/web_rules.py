"""Check the host name that a browser uses, and the page that sends its request.

Any web page can send form and link requests here without a preflight. The page can read the answer if we allow it, or
if the page's owner points a host name at this server (DNS rebinding). So host names are checked, and form requests from
other pages are refused. Programs other than browsers send no Origin, and pass the second check.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.http.connection import Connection, Header
from router.http.errors import HostNotAllowed, MediaTypeRefused
from router.http.ignored import IGNORED, LOOSENED, LOST, LOWERED, NORMALIZED, PLACEHOLDERS, UNENFORCED
from router.http.kept_answers import REPLAYED
from shared.config.settings.endpoints import is_loopback
from shared.config.settings.http_settings import ANY

JSON = "application/json"
UNITS = (b"requests", b"tokens")
KEPT_S = b"600"  # browsers may cache a preflight's answer for this time
RATES = b", ".join(b"x-ratelimit-%b-%b" % (what, unit) for what in (b"limit", b"remaining", b"reset") for unit in UNITS)
PLAIN = b"x-request-id, request-id, retry-after, retry-after-ms"
SHOWN = b", ".join((PLAIN, IGNORED, PLACEHOLDERS, NORMALIZED, LOST, LOWERED, LOOSENED, UNENFORCED, RATES, REPLAYED))
VARIES = (b"vary", b"Origin")
MAX_SHOWN = 100


class WebRules:
    """`allowed_hosts`: host names besides loopback names. `cors_origins`: pages that may read answers."""

    def __init__(self, allowed_hosts: Sequence[str], cors_origins: Sequence[str]) -> None:
        self._takes_all_hosts = ANY in allowed_hosts
        self._hosts = frozenset(map(str.lower, allowed_hosts))
        self._takes_all_origins = ANY in cors_origins
        self._origins = frozenset(map(str.lower, cors_origins))

    def check(self, connection: Connection) -> None:
        """Raise HostNotAllowed for a foreign host name, MediaTypeRefused for another page's request without
        preflight."""
        self._check_host(connection)
        origin = connection.header(b"origin")
        if origin is None or connection.scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return
        if self._may_use(origin) or is_same(origin, connection.header(b"host") or ""):
            return
        if media_type(connection.header(b"content-type")) != JSON:
            raise MediaTypeRefused(f"from other web pages this path takes {JSON} only")

    def _check_host(self, connection: Connection) -> None:
        """Allow requests without a Host header: browsers always send it."""
        hosts = [value for name, value in connection.scope["headers"] if name == b"host"]
        if self._takes_all_hosts or not hosts:
            return
        name = host_name(hosts[0].decode("latin-1"))
        if len(hosts) > 1 or not (is_loopback(name) or name in self._hosts):
            raise HostNotAllowed(f"this server is not {name[:MAX_SHOWN]!r}: see --allowed-hosts")

    def _may_use(self, origin: str) -> bool:
        return self._takes_all_origins or origin.lower() in self._origins

    def headers(self, connection: Connection) -> list[Header]:
        """Return CORS headers. `Vary` tells caches that answers differ by origin."""
        origin = connection.header(b"origin")
        if origin is None or not self._may_use(origin):
            return [VARIES] if self._origins else []
        allowed = b"*" if self._takes_all_origins else origin.encode("latin-1")
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", SHOWN),
            VARIES,
        ]

    def preflight(self, connection: Connection) -> list[Header] | None:
        """Return a preflight's headers; None for other requests and for pages that are not allowed."""
        if not is_preflight(connection):
            return None
        origin = connection.header(b"origin")
        if origin is None or not self._may_use(origin):
            return None
        headers = (connection.header(b"access-control-request-headers") or "").encode("latin-1")
        answer = [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", KEPT_S)]
        answer += [(b"access-control-allow-headers", headers)] if headers else []
        if connection.header(b"access-control-request-private-network"):
            answer.append((b"access-control-allow-private-network", b"true"))
        return answer


def is_preflight(connection: Connection) -> bool:
    return connection.scope["method"] == "OPTIONS" and connection.header(b"access-control-request-method") is not None


def host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def is_same(origin: str, host: str) -> bool:
    """Whether the page comes from this server, perhaps through a TLS proxy."""
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def media_type(given: str | None) -> str:
    return (given or "").partition(";")[0].strip().lower()
