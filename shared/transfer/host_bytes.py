"""Move page bytes out of and into pools through host memory, for transports that need it.

    pool on a CPU    the pages themselves, without a copy
    pool on a GPU    sender    page --copy--> | block | --> frames        the block is lent until its last frame is gone
                     receiver  frames --> | slot | slot | ... --copy--> page     a slot waits for its copy's event
    on several GPUs  | our part | rank 1's | ...    a page's bytes; the other ranks send and take theirs (KVPool.others)

Blocks and slots are pinned, for asynchronous copies. Everything runs on the transfer stream's thread, which may block.
The GPU half has run only on a virtual GPU.
"""

from __future__ import annotations

import itertools
import queue
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shared.core.errors import HandoffFailed
from shared.device.gpu import Gpu, GpuEvent
from shared.device.torch_cuda import TorchCuda
from shared.kv.pool import ByteArray, KVPool, OtherParts
from shared.transfer.interface import READY_BYTES, Part, fill_page

MAX_BLOCK_BYTES = 256 << 20  # limit on all blocks of one sender together
PATIENCE_S = 10.0  # twice the default silence_s: a peer silent for silence_s loses its frames, which frees blocks
NUM_SLOTS = 4


class PageReader(Protocol):
    """`num_blocks`: how many blocks may be lent at a time; 0 without blocks."""

    num_blocks: int

    def read(self, pages: Sequence[int], where: slice) -> tuple[list[ByteArray], ByteArray | None]:
        """Return the byte range `where` of each page, (n,) uint8 each, and the block that holds these bytes.

        Without a block, the pool holds the bytes. A block is not reused while anything refers to one of the arrays.
        Raise HandoffFailed if no block becomes free.
        """
        ...


class PageWriter(Protocol):
    def write(self, page: int, part: Part, source: ByteArray) -> ByteArray:
        """Copy `source` into a part of our own page, and zero the rest of the part.

        Return the new bytes for the digest, valid until the next call. A page in GPU memory has these bytes once
        the stream's work is done.
        """
        ...


def reader_of(pool: KVPool, gpu: Gpu | None = None) -> PageReader:
    if pool.device.type == "cpu":
        return HostReader(pool)
    own = PinnedReader(pool, gpu or TorchCuda())
    return own if pool.others is None else JoiningReader(own, pool.others)


def writer_of(pool: KVPool, gpu: Gpu | None = None) -> PageWriter:
    if pool.device.type == "cpu":
        return HostWriter(pool)
    own = PinnedWriter(pool, gpu or TorchCuda())
    return own if pool.others is None else DividingWriter(own, pool, pool.others)


class HostReader:
    """Returns views, which show later changes of their pages."""

    num_blocks = 0

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def read(self, pages: Sequence[int], where: slice) -> tuple[list[ByteArray], None]:
        return [self._pool.page_view(page)[where] for page in pages], None


class HostWriter:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def write(self, page: int, part: Part, source: ByteArray) -> ByteArray:
        return fill_page(self._pool.page_view(page), part, self._pool.planes, source)


class PinnedReader:
    """Copies pages in stream order, and blocks until the copies are done."""

    def __init__(
        self, pool: KVPool, gpu: Gpu, *, most_bytes: int = MAX_BLOCK_BYTES, patience_s: float = PATIENCE_S
    ) -> None:
        size = max(READY_BYTES, pool.page_bytes)
        self._pool = pool
        self._gpu = gpu
        self.num_blocks = max(1, most_bytes // size)
        self._blocks = PinnedBlocks(lambda: gpu.pinned((size,), torch.uint8), size, self.num_blocks, patience_s)

    def read(self, pages: Sequence[int], where: slice) -> tuple[list[ByteArray], ByteArray | None]:
        if not pages:
            return [], None
        size = where.stop - where.start
        places = [slice(index * size, (index + 1) * size) for index in range(len(pages))]
        block, lent = self._blocks.take_block(len(pages) * size)
        for page, place in zip(pages, places, strict=True):
            block[place].copy_(self._pool.pages_bytes[page, where], non_blocking=True)
        copied = self._gpu.new_event(blocking=True)
        copied.record(self._gpu.current_stream(self._pool.device))
        copied.synchronize()
        return [lent[place] for place in places], lent


class JoiningReader:
    """Joins the parts of all ranks, ours first. A block is fresh memory for each call."""

    def __init__(self, own: PinnedReader, others: OtherParts) -> None:
        self._own, self._others = own, others
        self.num_blocks = own.num_blocks

    def read(self, pages: Sequence[int], where: slice) -> tuple[list[ByteArray], ByteArray | None]:
        if not pages:
            return [], None
        own, _ = self._own.read(pages, where)
        whole: ByteArray = np.concatenate([np.stack(own), *self._others.read(pages, where)], axis=1)
        return list(whole), whole


class PinnedBlocks:
    """Owns a sender's pinned blocks, at most `most`.

    A block can be taken again once nothing refers to the array from `take` or to its parts, such as libzmq's frames.
    """

    def __init__(self, make: Callable[[], torch.Tensor], block_bytes: int, most: int, patience_s: float) -> None:
        self._make = make
        self._block_bytes = block_bytes
        self._most = most
        self._patience_s = patience_s
        # an array's finalizer puts its block here, on any thread
        self._back: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._num_made = 0

    def take_block(self, num_bytes: int) -> tuple[torch.Tensor, ByteArray]:
        """Return a block, and an array of the same memory, which the caller may lend.

        Only one stream may fill the block. While all blocks are lent, wait. Raise HandoffFailed if no block comes back
        in time, or if the bytes do not fit.
        """
        if num_bytes > self._block_bytes:
            raise HandoffFailed(f"{num_bytes} bytes in one message, but at most {self._block_bytes} fit")
        block = self._next()
        lent: ByteArray = block.numpy()  # a new array each time, kept alive only by its views
        weakref.finalize(lent, self._back.put, block).atexit = False
        return block, lent

    def _next(self) -> torch.Tensor:
        if self._num_made < self._most and self._back.empty():
            self._num_made += 1
            with torch.inference_mode(False):  # a block outlives this call
                return self._make()
        try:
            return self._back.get(timeout=self._patience_s)
        except queue.Empty:
            held = f"{self._most} blocks of {self._block_bytes} bytes"
            raise HandoffFailed(f"peers have not read {held} for {self._patience_s:g} s") from None


@dataclass(frozen=True, slots=True)
class Slot:
    """`memory`: (page_bytes,) uint8, pinned. `host`: the same memory. `copied`: the event after the last copy."""

    memory: torch.Tensor
    host: ByteArray
    copied: GpuEvent


class PinnedWriter:
    def __init__(self, pool: KVPool, gpu: Gpu) -> None:
        self._pool = pool
        self._gpu = gpu
        self._slots = itertools.cycle([self._make_slot() for _ in range(NUM_SLOTS)])

    def _make_slot(self) -> Slot:
        memory = self._gpu.pinned((self._pool.page_bytes,), torch.uint8)
        return Slot(memory, memory.numpy(), self._gpu.new_event(blocking=True))

    def write(self, page: int, part: Part, source: ByteArray) -> ByteArray:
        slot, size = next(self._slots), len(source)
        slot.copied.synchronize()
        np.copyto(slot.host[:size], source)
        target = self._pool.pages_bytes[page, part.bytes_in(self._pool.planes)]
        target[:size].copy_(slot.memory[:size], non_blocking=True)
        target[size:].zero_()
        slot.copied.record(self._gpu.current_stream(self._pool.device))
        return slot.host[:size]


class DividingWriter:
    """Divides a page among all ranks, ours first."""

    def __init__(self, own: PinnedWriter, pool: KVPool, others: OtherParts) -> None:
        self._own, self._pool, self._others = own, pool, others

    def write(self, page: int, part: Part, source: ByteArray) -> ByteArray:
        parts = source.reshape(self._pool.num_parts, -1)
        self._others.write(page, part.bytes_in(self._pool.planes), parts[1:])
        return np.concatenate([self._own.write(page, part, parts[0]), *parts[1:]])
