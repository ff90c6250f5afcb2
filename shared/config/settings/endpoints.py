"""Check addresses to bind or dial. Without keys, peers are not identified, so only loopback is allowed."""

from __future__ import annotations

import ipaddress

from shared.core.errors import ConfigError

DNS_MARK = "dns://"  # all addresses of a DNS name: dns://name:port
KEY_MARK = "#"  # before a node's key: tcp://host:port#key
MAX_PORT = 65535
ANY_NAMES = ("*", "", "0")  # besides numeric addresses
NO_KEYS = (
    "other machines can reach it, so routers and nodes need keys (`baton keys --help`): make them with `baton keys "
    "create`, copy them as it says, and start every router and node with --keys DIR. Without keys they serve this "
    "machine only (127.0.0.1, ::1 or localhost)"
)
UNPROVEN = ("gloo", "nccl", "nixl")  # transports whose library makes its own connections
UNPROVEN_NETWORK = (
    "its connections neither identify peers nor encrypt, even with keys. If everybody who can "
    "reach these machines may read and change their traffic, add --trust-network; else use zmq"
)
UNENCRYPTED = (
    "other machines can reach it, and keys and prompts would travel unencrypted. Give --tls-cert and --tls-key, or "
    "--plain-http if a proxy or the network encrypts, or serve this machine only (127.0.0.1, ::1 or localhost), for a "
    "proxy that speaks TLS or an SSH tunnel"
)
WITHOUT_KEYS = (
    "other machines can reach it, so clients need keys: give --api-key-file. (Keys of `baton keys create` are for the "
    "ports between routers and nodes.)"
)

GPUS_MARK = "."  # in a host id, before a name of the GPUs that the node sees


def same_host(one: str, other: str) -> bool:
    """Return whether nodes with these host ids can share the host's memory."""
    return one.partition(GPUS_MARK)[0] == other.partition(GPUS_MARK)[0]


def is_loopback(host: str) -> bool:
    address = numeric(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def bracketed(host: str) -> str:
    """Put an IPv6 address into brackets."""
    return f"[{host.strip('[]')}]" if ":" in host else host


def tcp_endpoint(host: str, port: int) -> str:
    return f"tcp://{bracketed(host)}:{port}"


def is_ipv6(endpoint: str) -> bool:
    """Return whether the endpoint has an IPv6 address."""
    return endpoint.startswith("tcp://") and ":" in endpoint.removeprefix("tcp://").rpartition(":")[0]


def is_any(host: str) -> bool:
    """Return whether the host stands for all addresses of a machine."""
    address = numeric(host)
    if address is None:
        return host in ANY_NAMES
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_unspecified


def check_bind_host(host: str, flag: str, *, has_keys: bool) -> None:
    if is_loopback(host):
        return
    if not has_keys:
        raise ConfigError(f"{flag} is {host!r}: {NO_KEYS}")
    if is_any(host):
        raise ConfigError(f"{flag} is {host!r}: others dial this address, so name a single address of this machine")


def check_router(entry: str, flag: str, *, has_keys: bool) -> None:
    """Accept dns://<name>:<port>, whose addresses are checked later, and every endpoint that check_endpoint accepts."""
    if not entry.startswith(DNS_MARK):
        check_endpoint(entry, flag, has_keys=has_keys)
        return
    name, _, port = entry.removeprefix(DNS_MARK).rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) <= MAX_PORT:
        raise ConfigError(f"{flag} is {entry!r}; it must look like dns://routers.example:7001")


def check_endpoint(endpoint: str, flag: str, *, has_keys: bool) -> None:
    """Accept ipc://<path>, and tcp://<host>:<port> if there are keys or the host is loopback."""
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{flag} is {endpoint!r}; it must look like tcp://127.0.0.1:7001 or ipc:///path/to/socket")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not port.isdigit() or int(port) > MAX_PORT:
        raise ConfigError(
            f"{flag} is {endpoint!r}; it needs a port from 0 to 65535 at its end, as tcp://127.0.0.1:7001"
        )
    if not has_keys and not is_loopback(host):
        raise ConfigError(f"{flag} is {endpoint!r}: {NO_KEYS}")


def check_node_address(address: str, node: str) -> None:
    """Raise ConfigError unless the address is tcp:// with a numeric host. Another node names this address.

    libzmq looks names up on the thread that serves all connections. Memory of ipc:// connections is not limited."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    has_port = port.isdigit() and int(port) <= MAX_PORT
    if not (address.startswith("tcp://") and numeric(host) is not None and has_port):
        raise ConfigError(f"{node} at {address[:200]!r}: nodes have addresses as tcp://10.0.0.2:7001, without names")
