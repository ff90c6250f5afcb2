"""What processes listen on, from the kernel's own socket lists."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"
WORD = 8  # hexadecimal digits of an address that the kernel shows in host order


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """(address, port) of every TCP socket that these processes accept connections on."""
    inodes = {inode for pid in pids for inode in socket_inodes(pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.append((address_of(address), int(port, 16)))
    return found


def socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def address_of(digits: str) -> str:
    words = [bytes.fromhex(digits[i : i + WORD])[::-1] for i in range(0, len(digits), WORD)]
    return str(ipaddress.ip_address(b"".join(words)))


def beyond_loopback(sockets: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(address, port) for address, port in sockets if not ipaddress.ip_address(address).is_loopback]
