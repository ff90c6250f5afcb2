"""Implement process groups of two nodes over torch.distributed, point to point: gloo on CPUs, nccl on GPUs.

Only the addresses travel over the nodes' authenticated connection. Neither backend authenticates its peer or encrypts,
so both need a trusted network.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from shared.core.errors import ConfigError
from shared.device.gpu import Gpu
from shared.device.torch_cuda import TorchCuda
from shared.transfer.link_store import LinkStore

RECEIVER, SENDER = 0, 1  # ranks; in nccl, rank 0 begins, so the receiver has rank 0
CONNECT_S = 15.0  # time limit for connecting, because gloo can't be aborted while it dials
NEVER_S = 7 * 86400.0  # never reached: a transfer completes earlier, or the peer's death ends it
Transfer = torch.Tensor | list[torch.Tensor]  # contiguous (n,) uint8 rows on the backend's device, sent in turn


class TorchGroup(Protocol):
    """One thread calls all methods except `abort`."""

    def connect(self, store: LinkStore, rank: int) -> None:
        """Raise if the peer can't be reached."""
        ...

    def start(self, transfer: Transfer) -> list[Any]:
        """Begin the next transfer, into the receiver's rows. Return the operations that `finish` must wait for.

        Both ends start transfers in the agreed order, with equal row sizes.
        """
        ...

    def finish(self, works: list[Any]) -> None:
        """Raise if the group ends."""
        ...

    def abort(self) -> None:
        """Make every blocked call raise."""
        ...

    def close(self) -> None:
        """Release the library's threads and sockets, after `abort`.

        Only `close` breaks the reference cycle of the library, the store, `tell` and this object.
        """
        ...


class GlooGroup:
    """A group over TCP at `host`. Abort closes the connection, because gloo would wait forever for a silent peer."""

    listening = threading.Lock()  # only one device of the process may make a listener at a time

    def __init__(self, host: str) -> None:
        self._host = host
        self._rank = -1
        self._group: Any = None
        self._sockets: list[socket.socket] = []
        self._aborted = False
        self._lock = threading.Lock()  # `abort` may be called during `connect`

    def connect(self, store: LinkStore, rank: int) -> None:
        with self.listening:
            before = set(listeners())
            device = dist.ProcessGroupGloo.create_device(hostname=self._host)
            ports = {port for port in listeners() if port not in before}
        own = min(ports, default=0)
        store.set(f"port/{rank}", f"{own:05}")
        peer = int(store.get(f"port/{1 - rank}"))
        options = cast(Any, dist.ProcessGroupGloo)._Options()  # torch's stubs know neither `_Options` nor `send`
        options._devices, options._threads = [device], 1
        options._timeout = timedelta(seconds=CONNECT_S)
        self._rank, self._group = rank, dist.ProcessGroupGloo(store, rank, 2, options)
        with self._lock:
            self._sockets = list(connections(own, peer))
        if self._aborted:
            self.abort()

    def start(self, transfer: Transfer) -> list[Any]:
        if self._rank == SENDER:
            return [self._group.send([row], RECEIVER, 0) for row in transfer]
        return [self._group.recv([row], SENDER, 0) for row in transfer]

    def finish(self, works: list[Any]) -> None:
        for work in works:
            work.wait(timedelta(seconds=NEVER_S))

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            sockets, self._sockets = self._sockets, []
        for connection in sockets:
            with contextlib.suppress(OSError), connection:
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._group = None


class NcclGroup:
    """A group between two GPUs of two processes. Follows torch's documentation. Never run: see docs/gpu.md."""

    def __init__(self, device: torch.device, gpu: Gpu | None = None) -> None:
        self._device = device
        self._gpu: Gpu = gpu or TorchCuda()
        self._rank = -1
        self._group: Any = None

    def connect(self, store: LinkStore, rank: int) -> None:
        options = dist.ProcessGroupNCCL.Options()
        # after a shorter time, the group's watchdog would end the process
        options._timeout = timedelta(seconds=NEVER_S)
        with self._gpu.use_device(self._device):
            group = dist.ProcessGroupNCCL(store, rank, 2, options)
            group.eager_connect_single_device(self._device)
        self._rank, self._group = rank, group

    def start(self, transfer: Transfer) -> list[Any]:
        with self._gpu.use_device(self._device):
            if self._rank == SENDER:
                return [self._group.send([row], RECEIVER, 0) for row in transfer]
            return [self._group.recv([row], SENDER, 0) for row in transfer]

    def finish(self, works: list[Any]) -> None:
        with self._gpu.use_device(self._device):
            for work in works:
                work.wait()  # only makes this thread's stream wait for the transfer
            self._gpu.current_stream(self._device).synchronize()

    def abort(self) -> None:
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        self._group = None


def make_torch_group(name: str, host: str, device: torch.device) -> TorchGroup:
    if name == "gloo" and dist.is_gloo_available():
        return GlooGroup(host.strip("[]"))
    if name == "nccl" and dist.is_nccl_available() and device.type == "cuda":
        return NcclGroup(device)
    raise ConfigError(f"this torch has no {name} for {device}")


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield a second handle of each TCP socket of this process. The next iteration closes this handle."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
        except OSError:  # the descriptor was closed after it was listed
            continue


def listeners() -> Iterator[int]:
    for found in tcp_sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield int(found.getsockname()[1])


def connections(own_port: int, peer_port: int) -> Iterator[socket.socket]:
    """Yield handles of the connections that use our own port or the peer's."""
    for found in tcp_sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            continue
        with contextlib.suppress(OSError):
            if found.getsockname()[1] == own_port or found.getpeername()[1] == peer_port:
                yield socket.socket(fileno=os.dup(found.fileno()))  # `found.dup()` would make both handles blocking
