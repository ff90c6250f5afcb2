"""Check a request's head by the rules of RFC 9110 and 9112 that the parser does not know. Knows no sockets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from router.http.errors import BadHttp, NotImplementedHere, VersionNotSupported
from shared.core.errors import BatonError

Headers = list[tuple[bytes, bytes]]
WHOLE_SERVER = "/*"  # our path for the target *
VERSIONS = ("1.1", "1.0")
# a name, an IPv4 address or an IPv6 address in brackets, and perhaps a port; empty if the target has no authority
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[-A-Za-z0-9._~!$&'()*+,;=%]*)(:[0-9]*)?")


def check_head(method: bytes, version: str, headers: Headers) -> None:
    """Raise an error for a version, method, Host or Transfer-Encoding that can't be served."""
    if version not in VERSIONS:
        raise not_spoken(version)
    if method == b"CONNECT":
        raise NotImplementedHere("this server is not a proxy, and has no CONNECT")
    num_hosts, codings = 0, None
    for name, value in headers:
        if name == b"host":
            num_hosts += 1
            if HOST.fullmatch(value) is None:
                raise BadHttp("the Host header is invalid")
        elif name == b"transfer-encoding":
            codings = value if codings is None else codings + b"," + value
    if num_hosts != 1 and (num_hosts or version == "1.1"):
        raise BadHttp("a request must have one Host header")
    if codings is not None:
        check_transfer(version, codings)


def not_spoken(version: str) -> VersionNotSupported:
    return VersionNotSupported(f"this server speaks HTTP/1.1, not HTTP/{version}")


def unreadable(version: str) -> BatonError:
    """Return the error for a head at which the parser stopped. `version`: 0.0 if it read none."""
    if version in (*VERSIONS, "0.0"):
        return BadHttp("this is not a valid HTTP request")
    return not_spoken(version)


def check_transfer(version: str, codings: bytes) -> None:
    if version == "1.0":
        raise BadHttp("HTTP/1.0 has no Transfer-Encoding")
    if codings.strip().lower() != b"chunked":
        raise NotImplementedHere("the only transfer coding that this server decodes is chunked")


def origin_form(target: bytes, headers: Headers) -> bytes:
    """Return the path and query of a target that is * or absolute. Raise BadHttp.

    The host of an absolute target replaces the Host header."""
    if target == b"*":
        return WHOLE_SERVER.encode()
    try:
        parts = urlsplit(target)
        is_valid = parts.scheme in (b"http", b"https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise BadHttp("the request's target is not a valid URL")
    host = parts.netloc.rpartition(b"@")[2]
    headers[:] = [(name, host if name == b"host" else value) for name, value in headers]
    return (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")


def without_upgrade(method: bytes, target: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Write a parsed head again, without the header Upgrade. A server may ignore it, and then the body follows."""
    lines = [b"%b %b HTTP/%b\r\n" % (method, target, version.encode())]
    lines += [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"".join([*lines, b"\r\n"])
