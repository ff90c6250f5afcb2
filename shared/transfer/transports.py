"""Find a node's transports, choose one for two nodes, and make both ends of a transport."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shared.config.settings.endpoints import GPUS_MARK, UNPROVEN, same_host
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

# best first, until speeds are measured
PREFERENCE = ("cuda_ipc", "shm", "nccl", "nixl", "zmq", "gloo")
UNTRIED = ("nccl", "nixl")  # only by name: they never ran
CHECKED = "cuda_ipc"  # by name, or after `baton doctor --gpu` read another process's memory on this machine
NAMESPACES = ("pid", "user")  # in /proc/self/ns; a process in other namespaces can't open our descriptors


def usable_transports(device: str, *, receives: bool = False) -> tuple[str, ...]:
    """Return the transports that this system and torch support for the kind of device, best first.

    `receives`: whether the node only receives pages.
    """
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
    setting: str, device: str = "cpu", *, receives: bool = False, trusts_network: bool = False, checked: bool = False
) -> tuple[str, ...]:
    """Return the transports that `--transport` allows here, best first.

    `auto` leaves out UNTRIED transports, and CHECKED unless it passed on this machine (`checked`). Libraries that don't
    authenticate peers need a trusted network. Raise ConfigError if a named transport can't work here.
    """
    usable = usable_transports(device, receives=receives)
    if setting == "auto":
        tried = [name for name in usable if name not in UNTRIED and (checked or name != CHECKED)]
        return tuple(name for name in tried if trusts_network or name not in UNPROVEN)
    if setting == "nixl":
        extras.require("nixl", "--transport nixl")
    if setting not in usable:
        raise ConfigError(f"--transport {setting} can't work here; this machine can use auto, {', '.join(usable)}")
    return (setting,)


def about_transports(device: str, *, checked: bool = False) -> str:
    """Explain what `auto` takes for pages on `device`, and what it leaves out."""
    if device == "cpu":
        return ""
    usable = usable_transports(device)
    left_out = [name for name in usable if name in UNTRIED]
    only = f"{', '.join(left_out)} only by name: never tried" if left_out else ""
    try_it = f"{CHECKED} after `baton doctor --gpu` has tried it here" if CHECKED in usable and not checked else ""
    return "; ".join(filter(None, ["zmq through pinned host memory", try_it, only]))


def choose_transport(
    host_id: str, transports: Sequence[str], peer_host_id: str, peer_transports: Sequence[str]
) -> str | None:
    """Return the first of the peer's transports that this node has too, or None to refuse the offer.

    The peer has sorted its list by measured speed.
    """
    near = {"shm": same_host(host_id, peer_host_id), CHECKED: host_id == peer_host_id}
    return next((name for name in peer_transports if name in transports and near.get(name, True)), None)


def host_id(gpus: str = "") -> str:
    """Return an id made of boot, namespaces and user. Processes with equal ids may open each other's descriptors.

    `gpus`: a name of the GPUs that this process sees. Nodes that see others don't hand over by CHECKED, which opens the
    peer's memory on the peer's GPU.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts = [file.read().strip()]
        parts += [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in NAMESPACES]
    except OSError:  # without /proc nothing can be shared: return an id that no other node has
        return secrets.token_hex(8)
    own = hashlib.sha256("/".join([*parts, str(os.geteuid())]).encode()).hexdigest()[:16]
    return f"{own}{GPUS_MARK}{gpus}" if gpus else own


def make_sender(name: str, pool: KVPool, gpu: Gpu | None = None) -> PageSender:
    """Raise ConfigError for an unknown name."""
    if name == "shm":
        return ShmSender(pool)
    if name == "zmq":
        return FrameSender(pool, gpu)
    if name in STAGED:
        return StagedSender(name, pool)
    if name in ("cuda_ipc", "nixl"):
        return RemoteSender(pool, open_library(name, pool, gpu))
    raise ConfigError(f"unknown transport {name!r}; there are {', '.join(PREFERENCE)}")


def make_receiver(name: str, pool: KVPool, gpu: Gpu | None = None) -> PageReceiver:
    if name == "shm":
        return ShmReceiver(pool, gpu)
    if name == "zmq":
        return FrameReceiver(pool, gpu)
    if name in STAGED:
        return StagedReceiver(name, pool)
    if name in ("cuda_ipc", "nixl"):
        return RemoteReceiver(pool, open_library(name, pool, gpu))
    raise ConfigError(f"unknown transport {name!r}; there are {', '.join(PREFERENCE)}")


def open_library(name: str, pool: KVPool, gpu: Gpu | None) -> CudaIpc | nixl.Nixl:
    """Raise ConfigError if the library is not installed."""
    return CudaIpc(pool, gpu) if name == "cuda_ipc" else nixl.Nixl(pool, nixl.import_nixl())


def open_group(name: str, rank: int, host: str, device: torch.device, wake: Callable[[], None]) -> GroupThread:
    """`host`: the address from which gloo listens and dials."""
    return GroupThread(make_torch_group(name, host, device), rank, wake)
