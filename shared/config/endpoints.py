"""Which addresses may be bound or dialled: only this machine, until nodes and clients can prove who they are."""

from __future__ import annotations

import ipaddress

from shared.core.errors import ConfigError

NO_KEYS = (
    "this version serves this machine only (127.0.0.1, ::1 or localhost): addresses that others can reach need keys "
    "between nodes, which come with a later version. To reach it from elsewhere, use an SSH tunnel"
)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_loopback(host: str, flag: str) -> None:
    if not is_loopback(host):
        raise ConfigError(f"{flag} is {host!r}: {NO_KEYS}")


def check_endpoint(endpoint: str, flag: str) -> None:
    """Accepts tcp://<loopback>:<port> and ipc://<path>."""
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{flag} is {endpoint!r}; it must look like tcp://127.0.0.1:7001 or ipc:///path/to/socket")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{flag} is {endpoint!r}; it needs a port from 0 to 65535 at its end, as tcp://127.0.0.1:7001"
        )
    require_loopback(host, flag)
