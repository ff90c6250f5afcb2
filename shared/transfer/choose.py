"""Which transport two nodes use, and the two ends of it. Knows nothing of pages."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Sequence

from shared.core.errors import ConfigError
from shared.kv.pool import KVPool
from shared.transfer.frames import FrameReceiver, FrameSender
from shared.transfer.interface import PageReceiver, PageSender
from shared.transfer.shm import ShmReceiver, ShmSender

PREFERENCE = ("shm", "zmq")  # best first
NAMESPACES = ("pid", "user")  # of /proc/self/ns: processes in others can't open our descriptors


def available_transports(setting: str) -> tuple[str, ...]:
    """What `--transport` allows on this system, best first. `auto` is everything."""
    can_share = sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
    usable = PREFERENCE if can_share else ("zmq",)
    if setting == "auto":
        return usable
    if setting not in usable:
        raise ConfigError(f"--transport {setting} can't work here; this machine has auto, {', '.join(usable)}")
    return (setting,)


def choose_transport(
    host_id: str, transports: Sequence[str], peer_host_id: str, peer_transports: Sequence[str]
) -> str | None:
    """The best that both have; shm only on one host. None: refuse the offer."""
    for name in PREFERENCE:
        if name in transports and name in peer_transports and (name != "shm" or host_id == peer_host_id):
            return name
    return None


def host_id() -> str:
    """Equal for two processes exactly when one may open the other's descriptors: one boot, namespaces, one user."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts = [file.read().strip()]
        parts += [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in NAMESPACES]
    except OSError:  # no /proc: nothing can be shared, so be alone
        return secrets.token_hex(8)
    return hashlib.sha256("/".join([*parts, str(os.geteuid())]).encode()).hexdigest()[:16]


def make_sender(name: str, pool: KVPool) -> PageSender:
    if name == "shm":
        return ShmSender(pool)
    if name == "zmq":
        return FrameSender(pool)
    raise ConfigError(f"no transport {name!r}; there are {', '.join(PREFERENCE)}")


def make_receiver(name: str, pool: KVPool) -> PageReceiver:
    if name == "shm":
        return ShmReceiver(pool)
    if name == "zmq":
        return FrameReceiver(pool)
    raise ConfigError(f"no transport {name!r}; there are {', '.join(PREFERENCE)}")
