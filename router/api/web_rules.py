"""What a browser may do on a page's behalf: which names the API answers under, and which pages may use it.

A web page may send this machine a request that looks like a form's or a link's; its browser does not ask us first. The
page can't read the answer unless it runs under our own name, which its owner can point here, or unless we allow it. So
names are checked, and requests of a form's type from other pages are refused. A program that is no browser sends no
Origin, and notices nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.api.connection import Connection, Header
from router.api.errors import HostNotAllowed, MediaTypeRefused
from router.api.kept_answers import REPLAYED
from shared.config.endpoints import is_loopback
from shared.config.http_settings import ANY

JSON = "application/json"
KEPT_S = b"600"  # how long a browser may remember that a page is allowed
SHOWN = b"x-request-id, request-id, retry-after, x-baton-ignored-fields, " + REPLAYED
VARIES = (b"vary", b"Origin")
MAX_SHOWN = 100


class WebRules:
    """`allowed_hosts`: beside this machine's own names. `cors_origins`: pages that may read answers."""

    def __init__(self, allowed_hosts: Sequence[str], cors_origins: Sequence[str]) -> None:
        self._takes_all_hosts = ANY in allowed_hosts
        self._hosts = frozenset(map(str.lower, allowed_hosts))
        self._takes_all_origins = ANY in cors_origins
        self._origins = frozenset(map(str.lower, cors_origins))

    def check(self, connection: Connection) -> None:
        """Raise for a name that is not ours, and for what a foreign page sent without asking."""
        self._check_host(connection)
        origin = connection.header(b"origin")
        if origin is None or connection.scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return
        if self._may_use(origin) or is_same(origin, connection.header(b"host") or ""):
            return
        if media_type(connection.header(b"content-type")) != JSON:
            raise MediaTypeRefused(f"from a web page elsewhere this path takes {JSON} only")

    def _check_host(self, connection: Connection) -> None:
        """Every browser sends a Host header, so a request without one is not a browser's."""
        hosts = [value for name, value in connection.scope["headers"] if name == b"host"]
        if self._takes_all_hosts or not hosts:
            return
        name = host_name(hosts[0].decode("latin-1"))
        if len(hosts) > 1 or not (is_loopback(name) or name in self._hosts):
            raise HostNotAllowed(f"this server is not {name[:MAX_SHOWN]!r}: see --allowed-hosts")

    def _may_use(self, origin: str) -> bool:
        return self._takes_all_origins or origin.lower() in self._origins

    def headers(self, connection: Connection) -> list[Header]:
        """Return what every answer to an allowed page carries. Where only some origins are allowed, every answer says
        that it depends on the origin: a cache must not give one page what another asked for."""
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
        """Return the answer's headers where a browser asks before it sends; None where it does not, or may not."""
        wanted = connection.header(b"access-control-request-method")
        if connection.scope["method"] != "OPTIONS" or wanted is None:
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


def host_name(host: str) -> str:
    """Return the name without its port, [::1]:8000 without its brackets, too."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def is_same(origin: str, host: str) -> bool:
    """Whether a page came from here. A proxy before us speaks TLS, and we do not."""
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def media_type(given: str | None) -> str:
    return (given or "").partition(";")[0].strip().lower()
