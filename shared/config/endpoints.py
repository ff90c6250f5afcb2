"""Which addresses may be bound or dialled: without keys only this machine, for nobody else can prove who they are."""

from __future__ import annotations

import ipaddress

from shared.core.errors import ConfigError

KEY_MARK = "#"  # tcp://host:port#key: where a node is, and the key that it answers under
ANY_ADDRESS = ("0.0.0.0", "::", "*", "")
NO_KEYS = (
    "other machines can reach it, so routers and nodes need keys (`baton keys --help`): make them with `baton keys "
    "create`, copy them as it says, and start every router and node with --keys DIR. Without keys they serve this "
    "machine only (127.0.0.1, ::1 or localhost)"
)
UNPROVEN = ("gloo", "nccl", "nixl")  # transports whose connections are a library's own
UNPROVEN_NETWORK = (
    "its connections neither prove who is at the other end nor encrypt, with keys neither. If everybody who can "
    "reach these machines may read and change what they say to each other, add --trust-network; else use zmq"
)
NO_CLIENT_KEYS = (
    "the HTTP API serves this machine only (127.0.0.1, ::1 or localhost), for it does not encrypt what clients send. "
    "To reach it from elsewhere use a proxy that speaks TLS, or an SSH tunnel. (Keys of `baton keys` are for the ports "
    "between routers and nodes; clients' keys are --api-key-file.)"
)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_http_host(host: str, flag: str) -> None:
    if not is_loopback(host):
        raise ConfigError(f"{flag} is {host!r}: {NO_CLIENT_KEYS}")


def check_bind_host(host: str, flag: str, *, has_keys: bool) -> None:
    """The address that a node tells others to dial."""
    if is_loopback(host):
        return
    if not has_keys:
        raise ConfigError(f"{flag} is {host!r}: {NO_KEYS}")
    if host in ANY_ADDRESS:
        raise ConfigError(f"{flag} is {host!r}: others dial what stands here, so name one address of this machine")


def check_endpoint(endpoint: str, flag: str, *, has_keys: bool) -> None:
    """Accepts tcp://<host>:<port>, on loopback or with keys, and ipc://<path>."""
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{flag} is {endpoint!r}; it must look like tcp://127.0.0.1:7001 or ipc:///path/to/socket")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{flag} is {endpoint!r}; it needs a port from 0 to 65535 at its end, as tcp://127.0.0.1:7001"
        )
    if not has_keys and not is_loopback(host):
        raise ConfigError(f"{flag} is {endpoint!r}: {NO_KEYS}")
