"""A process group of two over torch.distributed point to point: gloo on CPUs, nccl on GPUs. Knows nothing of pages.

Neither backend proves who is at the other end, and neither encrypts. Addresses come over the authenticated channel;
the bytes do not. So both are for networks that are trusted.
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

RECEIVER, SENDER = 0, 1  # ranks; nccl's rank 0 speaks first, as the receiver does
CONNECT_S = 15.0  # while gloo dials it hears of no abort
NEVER_S = 7 * 86400.0  # a transfer is over when it is, or when its peer is dead: no time of its own ends it
Transfer = torch.Tensor | list[torch.Tensor]  # rows of (n,) uint8, contiguous, on the backend's device, sent in turn


class TorchGroup(Protocol):
    """One pair's group. `connect`, `start` and `finish` run on one thread, `abort` on any other."""

    def connect(self, store: LinkStore, rank: int) -> None:
        """Blocks until the peer is there; raises when it can't be reached."""
        ...

    def start(self, transfer: Transfer) -> list[Any]:
        """Begin the next transfer in the order that both sides agreed on, rows of the same sizes at both ends. The
        receiver's are written. Gives what `finish` takes."""
        ...

    def finish(self, works: list[Any]) -> None:
        """Block until that transfer is over; raises when the group is."""
        ...

    def abort(self) -> None:
        """The peer is proven dead, or the group is not needed any more: whoever blocks in it raises."""
        ...

    def close(self) -> None:
        """After `abort`, on the thread of the others: let go of the library's threads and sockets. It holds the store,
        and so what the store tells, which holds this: nobody else would end that."""
        ...


class GlooGroup:
    """TCP between the two, from and to `host`. Aborted by closing its connection, for gloo itself never gives up a
    transfer whose peer is silent."""

    listening = threading.Lock()  # of one process: which listener is whose is seen by what a device adds

    def __init__(self, host: str) -> None:
        self._host = host
        self._rank = -1
        self._group: Any = None
        self._sockets: list[socket.socket] = []
        self._aborted = False
        self._lock = threading.Lock()  # abort against connect

    def connect(self, store: LinkStore, rank: int) -> None:
        with self.listening:
            before = set(listeners())
            device = dist.ProcessGroupGloo.create_device(hostname=self._host)
            ports = {port for port in listeners() if port not in before}
        own = min(ports, default=0)
        store.set(f"port/{rank}", f"{own:05}")
        peer = int(store.get(f"port/{1 - rank}"))
        options = cast(Any, dist.ProcessGroupGloo)._Options()  # torch's stubs know neither this nor `send`
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
    """Between two GPUs, each process on its own. Written after torch's documentation and never run: see README."""

    def __init__(self, device: torch.device, gpu: Gpu | None = None) -> None:
        self._device = device
        self._gpu: Gpu = gpu or TorchCuda()
        self._rank = -1
        self._group: Any = None

    def connect(self, store: LinkStore, rank: int) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NEVER_S)  # its watchdog would end the process
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
                work.wait()  # orders this thread's stream behind the transfer; the bytes are there when that is done
            self._gpu.current_stream(self._device).synchronize()

    def abort(self) -> None:
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        self._group = None


def make_torch_group(name: str, host: str, device: torch.device) -> TorchGroup:
    if name == "gloo" and dist.is_gloo_available():
        return GlooGroup(host)
    if name == "nccl" and dist.is_nccl_available() and device.type == "cuda":
        return NcclGroup(device)
    raise ConfigError(f"this torch has no {name} for {device}")


def tcp_sockets() -> Iterator[socket.socket]:
    """A second handle on each TCP socket of this process, closed when the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
        except OSError:  # closed since it was listed
            continue


def listeners() -> Iterator[int]:
    """Ports that this process listens on."""
    for found in tcp_sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield int(found.getsockname()[1])


def connections(own_port: int, peer_port: int) -> Iterator[socket.socket]:
    """Handles on connections that came to the one port or went to the other: a group of two has just one."""
    for found in tcp_sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            continue
        with contextlib.suppress(OSError):
            if found.getsockname()[1] == own_port or found.getpeername()[1] == peer_port:
                yield socket.socket(fileno=os.dup(found.fileno()))  # `found.dup()` would make it blocking, gloo's too
