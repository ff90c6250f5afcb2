"""Transport `shm`, within one host: the receiver maps the sender's pool read-only and copies pages out of it.

    sender's memory file  ---- /proc/<pid>/fd/<fd>, PROT_READ ---->  copy  ->  generation unchanged?  ->  digest right?

Neither side can harm the other, even by freezing or dying. A mapping outlives its sender until `forget_dead`.

A receiver's pool may be on a GPU: its copies then go through pinned memory (host_bytes.py). A sender's pool must not be
on a GPU: whole prompts would stay in host memory until all receivers have copied them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shared.core.errors import HandoffFailed
from shared.device.gpu import Gpu
from shared.kv.pool import KVPool, ReadOnlyPool
from shared.transfer.host_bytes import writer_of
from shared.transfer.interface import (
    WHOLE,
    Frames,
    PageList,
    PageSet,
    Part,
    describe_pages,
    part_of,
    require_digest,
    require_lengths,
    require_part_bytes,
)
from shared.wire.messages import Ready
from shared.wire.parts import PoolRef

MAX_OPEN_POOLS = 64


class ShmSender:
    """The pool must be made with shared=True."""

    name = "shm"
    num_blocks = 0
    is_inline = False

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.ref = PoolRef(os.getpid(), pool.fd, pool.num_pages, pool.page_bytes, pool.nonce)

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        numbers, generations, digests = describe_pages(self._pool, pages, part)
        return PageSet(numbers, generations, digests, pool=self.ref, part=part)


@dataclass(frozen=True, slots=True)
class OpenPool:
    """A mapped pool. If its file's id differs, the sender is gone, and another process may have its pid."""

    pool: ReadOnlyPool
    file_id: tuple[int, int]


class ShmReceiver:
    name = "shm"

    def __init__(self, pool: KVPool, gpu: Gpu | None = None) -> None:
        self._pool = pool
        self._writer = writer_of(pool, gpu)
        self._open: dict[PoolRef, OpenPool] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        require_lengths(ready, dst_pages, self._pool.num_pages)
        part = part_of(ready, self._pool)
        where = part.bytes_in(self._pool.planes)
        if ready.pool is None or len(frames):
            raise HandoffFailed("pages came as frames, but a shared pool was granted")
        source = self._mapped(ready.pool)
        for src, generation, digest, dst in zip(ready.pages, ready.generations, ready.digests, dst_pages, strict=True):
            copied = self._writer.write(int(dst), part, source.page(src)[where])
            if int(source.generation[src]) != generation:
                raise HandoffFailed(f"page {src} has a new owner: its generation changed", subject=ready.key.rid)
            require_digest(copied, digest, src, subject=ready.key.rid)

    def forget_dead(self) -> None:
        for ref, mapped in list(self._open.items()):
            if file_id(ref) != mapped.file_id:
                del self._open[ref]
                mapped.pool.close()

    def close(self) -> None:
        for mapped in self._open.values():
            mapped.pool.close()
        self._open.clear()

    def _mapped(self, ref: PoolRef) -> ReadOnlyPool:
        known = self._open.get(ref)
        if known is not None:
            return known.pool
        require_part_bytes(ref.page_bytes, WHOLE, self._pool)
        self.forget_dead()
        if len(self._open) >= MAX_OPEN_POOLS:
            raise HandoffFailed(f"{MAX_OPEN_POOLS} pools of peers are open already")
        pool = ReadOnlyPool.open(ref.pid, ref.fd, ref.num_pages, ref.page_bytes, ref.nonce)
        identity = file_id(ref)
        if identity is None:
            pool.close()
            raise HandoffFailed(f"pid {ref.pid} is gone")
        self._open[ref] = OpenPool(pool, identity)
        return pool


def file_id(ref: PoolRef) -> tuple[int, int] | None:
    """Return (device, inode), if the file exists."""
    try:
        info = os.stat(f"/proc/{ref.pid}/fd/{ref.fd}")
    except (OSError, ValueError):
        return None
    return info.st_dev, info.st_ino
