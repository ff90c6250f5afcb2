"""Transport `cuda_ipc`, within one host: the receiver opens the sender's GPU memory, and the receiver's GPU copies
pages.

The code follows torch.multiprocessing's tensor sharing, without pickle. It ran between processes of one H100, not
between GPUs; tests use a virtual GPU in one process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple

import msgspec
import torch

from shared.core.errors import HandoffFailed
from shared.device.gpu import Gpu, SharedBlock
from shared.device.torch_cuda import TorchCuda
from shared.kv.pool import KVPool
from shared.transfer.digest import copy_and_digest

START_FIELD = 22 - 3  # proc(5) counts fields from 1; the first two are already split off


class IpcHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The pool's sizes, and the fields with which torch opens another process's storage.

    `gpu`: the device's uuid. `device`: its number in the sender's process.
    """

    pid: int
    num_pages: int
    page_bytes: int
    nonce: int
    gpu: str
    device: int
    storage: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


class CudaIpc:
    """A RemoteMemory. The pool must be cudaMalloc memory, without expandable segments."""

    name = "cuda_ipc"

    def __init__(self, pool: KVPool, gpu: Gpu | None = None) -> None:
        self._pool = pool
        self._gpu: Gpu = gpu or TorchCuda()

    def export(self) -> bytes:
        pool = self._pool
        shared, uuid = astuple(self._gpu.share(pool.pages_bytes)), self._gpu.uuid(pool.device)
        handle = IpcHandle(os.getpid(), pool.num_pages, pool.page_bytes, pool.nonce, uuid, *shared)
        return msgspec.msgpack.encode(handle)

    def open(self, handle: bytes) -> OpenIpc:
        found = decode_handle(handle)
        block = SharedBlock(
            self._number_of(found.gpu), found.storage, found.storage_bytes, found.storage_offset, found.counter,
            found.counter_offset, found.event, found.event_sync,
        )  # fmt: skip
        flat = self._gpu.open_shared(block)
        return OpenIpc(self._pool, found, flat.view(found.num_pages, found.page_bytes))

    def _number_of(self, uuid: str) -> int:
        count = self._gpu.device_count()
        for index in range(count):
            if self._gpu.uuid(torch.device(self._pool.device.type, index)) == uuid:
                return index
        raise HandoffFailed(
            f"cuda_ipc: the peer's GPU {uuid} is not one of the {count} GPUs of this process: let both nodes see both "
            "GPUs (CUDA_VISIBLE_DEVICES, each its own one first), or use --transport zmq"
        )


def decode_handle(handle: bytes) -> IpcHandle:
    """Raise HandoffFailed for an invalid handle."""
    try:
        found = msgspec.msgpack.decode(handle, type=IpcHandle)
    except msgspec.MsgspecError as error:
        raise HandoffFailed(f"cuda_ipc: an invalid handle: {error}") from None
    fits = found.num_pages > 1 and found.page_bytes > 0 and found.pid > 0
    if not fits or found.num_pages * found.page_bytes != found.storage_bytes:
        raise HandoffFailed(f"cuda_ipc: {found.num_pages} pages of {found.page_bytes} in {found.storage_bytes} bytes")
    return found


def started_at(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None if the process doesn't exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[START_FIELD])
    except OSError:
        return None


class OpenIpc:
    """A peer's pool, read-only. pages: (num_pages, page_bytes) uint8."""

    def __init__(self, own: KVPool, handle: IpcHandle, pages: torch.Tensor) -> None:
        self.num_pages, self.page_bytes = handle.num_pages, handle.page_bytes
        self.owner = str(handle.pid)
        self._own = own
        self._pid, self._started = handle.pid, started_at(handle.pid)
        self._pages = pages

    def read(self, pages: Sequence[int], part_bytes: slice, dst_pages: Sequence[int]) -> list[int]:
        return copy_and_digest(self._pages, list(pages), self._own.pages_bytes, list(dst_pages), part_bytes)

    @property
    def is_dead(self) -> bool:
        """Return whether the process is gone. A new process may have its pid."""
        return self._started is None or started_at(self._pid) != self._started

    def close(self) -> None:
        """torch unmaps the memory when its last tensor is freed."""
        self._pages = self._pages.new_empty((0, 0))
