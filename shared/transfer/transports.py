"""Which transports a node has, which of them two nodes use, and the two ends of one. Knows nothing of pages."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shared.config.endpoints import UNPROVEN
from shared.core import extras
from shared.core.errors import ConfigError
from shared.device.gpu import Gpu
from shared.kv.pool import KVPool
from shared.transfer import nixl
from shared.transfer.cuda_ipc import CudaIpc
from shared.transfer.frames import FrameReceiver, FrameSender
from shared.transfer.group_thread import GroupThread
from shared.transfer.interface import PageReceiver, PageSender
from shared.transfer.remote import RemoteReceiver, RemoteSender
from shared.transfer.shm import ShmReceiver, ShmSender
from shared.transfer.staged import STAGED, StagedReceiver, StagedSender
from shared.transfer.torch_groups import make_torch_group

PREFERENCE = ("cuda_ipc", "shm", "nccl", "nixl", "zmq", "gloo")  # best first, while nothing was measured
UNTRIED = ("cuda_ipc", "nccl", "nixl")  # never run on hardware: only for those who ask for them by name
SAME_HOST = ("cuda_ipc", "shm")
NAMESPACES = ("pid", "user")  # of /proc/self/ns: processes in others can't open our descriptors


def usable_transports(device: str, *, receives: bool = False) -> tuple[str, ...]:
    """What this system and this torch have for pages on that kind of device, best first. `receives`: for a node that
    sends no pages."""
    can_share = sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
    has = {
        "cuda_ipc": device == "cuda" and sys.platform == "linux",
        "nixl": nixl.is_installed(),
        "shm": (device == "cpu" or receives) and can_share,
        "nccl": device == "cuda" and dist.is_available() and dist.is_nccl_available(),
        "zmq": True,
        "gloo": device == "cpu" and sys.platform == "linux" and dist.is_available() and dist.is_gloo_available(),
    }
    return tuple(name for name in PREFERENCE if has[name])


def available_transports(
    setting: str, device: str = "cpu", *, receives: bool = False, trusts_network: bool = False
) -> tuple[str, ...]:
    """What `--transport` allows here, best first, never nothing. `auto` is everything that has been run, but libraries'
    own connections only where the network is trusted: nobody proves who he is there."""
    usable = usable_transports(device, receives=receives)
    if setting == "auto":
        tried = [name for name in usable if name not in UNTRIED]
        return tuple(name for name in tried if trusts_network or name not in UNPROVEN)
    if setting == "nixl":
        extras.require("nixl", "--transport nixl")
    if setting not in usable:
        raise ConfigError(f"--transport {setting} can't work here; this machine has auto, {', '.join(usable)}")
    return (setting,)


def about_transports(device: str) -> str:
    """Why `auto` offers what it offers for pages on that kind of device, where it leaves something out."""
    left_out = [name for name in usable_transports(device) if name in UNTRIED]
    staged = "" if device == "cpu" else "through pinned host memory"
    only = f"{', '.join(left_out)} only by name: never run on hardware" if left_out else ""
    return "; ".join(filter(None, [staged, only]))


def choose_transport(
    host_id: str, transports: Sequence[str], peer_host_id: str, peer_transports: Sequence[str]
) -> str | None:
    """The first of the peer's, who has measured them, that we have too; shared memory only on one host. None: refuse
    the offer."""
    for name in peer_transports:
        if name in transports and (name not in SAME_HOST or host_id == peer_host_id):
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


def make_sender(name: str, pool: KVPool, gpu: Gpu | None = None) -> PageSender:
    """`gpu`: that of a pool on one; torch.cuda if None."""
    if name == "shm":
        return ShmSender(pool)
    if name == "zmq":
        return FrameSender(pool, gpu)
    if name in STAGED:
        return StagedSender(name, pool)
    if name in ("cuda_ipc", "nixl"):
        return RemoteSender(pool, open_library(name, pool, gpu))
    raise ConfigError(f"no transport {name!r}; there are {', '.join(PREFERENCE)}")


def make_receiver(name: str, pool: KVPool, gpu: Gpu | None = None) -> PageReceiver:
    """As make_sender."""
    if name == "shm":
        return ShmReceiver(pool, gpu)
    if name == "zmq":
        return FrameReceiver(pool, gpu)
    if name in STAGED:
        return StagedReceiver(name, pool)
    if name in ("cuda_ipc", "nixl"):
        return RemoteReceiver(pool, open_library(name, pool, gpu))
    raise ConfigError(f"no transport {name!r}; there are {', '.join(PREFERENCE)}")


def open_library(name: str, pool: KVPool, gpu: Gpu | None) -> CudaIpc | nixl.Nixl:
    """ConfigError where it is not installed."""
    return CudaIpc(pool, gpu) if name == "cuda_ipc" else nixl.Nixl(pool, nixl.import_nixl())


def open_group(name: str, rank: int, host: str, device: torch.device, wake: Callable[[], None]) -> GroupThread:
    """Starts connecting at once, on a thread of its own. host: the address that gloo listens on and dials from."""
    return GroupThread(make_torch_group(name, host, device), rank, wake)
