"""Read a node's list of routers from a file, or from names in DNS. Reading may block."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.config.settings.endpoints import DNS_MARK, check_endpoint, tcp_endpoint
from shared.core.errors import ConfigError

FILE_EVERY_S = 0.5
DNS_EVERY_S = 3.0
MAX_FILE_BYTES = 1 << 20
MAX_ROUTERS = 1024  # limit on the routers of one source
COMMENT = "#"
Lookup = Callable[[str, int], Sequence[Any]]


class RouterSource(Protocol):
    """`every_s`: time between two reads of the source."""

    @property
    def name(self) -> str: ...

    @property
    def every_s(self) -> float: ...

    def read(self) -> tuple[str, ...]:
        """Raise OSError or ConfigError if there are no endpoints."""
        ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file with one endpoint per line; # begins a comment."""

    path: Path
    has_keys: bool
    every_s: float = FILE_EVERY_S

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self) -> tuple[str, ...]:
        with self.path.open(encoding="utf-8") as opened:
            text = opened.read(MAX_FILE_BYTES)
        lines = [line.partition(COMMENT)[0].strip() for line in text.splitlines()]
        return checked(list(filter(None, lines)), self.name, self.has_keys)


@dataclass(frozen=True, slots=True)
class DnsSource:
    """`entry`: dns://name:port. With both kinds of addresses, only IPv4 counts, or routers would be dialled twice."""

    entry: str
    has_keys: bool
    lookup: Lookup = socket.getaddrinfo
    every_s: float = DNS_EVERY_S

    @property
    def name(self) -> str:
        return self.entry

    def read(self) -> tuple[str, ...]:
        host, _, port = self.entry.removeprefix(DNS_MARK).rpartition(":")
        found = {str(info[4][0]) for info in self.lookup(host, int(port))}
        addresses = {address for address in found if ":" not in address} or found
        endpoints = [tcp_endpoint(address, int(port)) for address in sorted(addresses)]
        return checked(endpoints, self.name, self.has_keys)


def checked(endpoints: Sequence[str], source: str, has_keys: bool) -> tuple[str, ...]:
    """Return the endpoints without duplicates. Raise ConfigError if an endpoint can't be dialled.

    The node would leave routers that a shortened list lacks, so it refuses the whole list.
    """
    if not 0 < len(endpoints) <= MAX_ROUTERS:
        raise ConfigError(f"{source} names {len(endpoints)} routers: it must name from 1 to {MAX_ROUTERS}")
    for endpoint in endpoints:
        check_endpoint(endpoint, source, has_keys=has_keys)
    return tuple(dict.fromkeys(endpoints))


def sources_of(routers: Sequence[str], file: str, *, has_keys: bool) -> tuple[tuple[str, ...], list[RouterSource]]:
    """Return the flags' endpoints, and the sources to read.

    An unreadable file raises ConfigError at the start. Later, an unreadable file leaves the list as it is.
    """
    fixed = tuple(entry for entry in routers if not entry.startswith(DNS_MARK))
    sources: list[RouterSource] = [DnsSource(entry, has_keys) for entry in routers if entry.startswith(DNS_MARK)]
    if file:
        source = FileSource(Path(file).expanduser(), has_keys)
        try:
            source.read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--routers-file {file}: {error}") from None
        sources.append(source)
    return fixed, sources
