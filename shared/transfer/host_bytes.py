"""Bytes of pages where the host can read and send them, and back: for transports whose pages pass host memory.

    pool on a CPU    the pages themselves, without a copy
    pool on a GPU    sender    page --copy--> | block | --> frames    they have the block until the last of them is gone
                     receiver  frames --> | slot | slot | ... --copy--> page       a slot waits for its copy's event

Blocks and slots are pinned, so the GPU copies by itself. All of it runs on the transfer stream's own thread, which may
block. Knows nothing of messages. The GPU's half has never run on a GPU; its tests use a virtual one.
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
from shared.kv.pool import ByteArray, KVPool
from shared.transfer.interface import READY_BYTES, Part, fill_page

MAX_BLOCK_BYTES = 256 << 20  # all blocks of one sender
PATIENCE_S = 10.0  # twice the silence after which a peer is given up by default, and its frames with it
NUM_SLOTS = 4


class PageReader(Protocol):
    """Reads pages for a sender. `num_blocks`: the most blocks that it lends at a time; 0: it lends none."""

    num_blocks: int

    def read(self, pages: Sequence[int], where: slice) -> tuple[list[ByteArray], ByteArray | None]:
        """Return bytes `where` of each page, (n,) uint8 each, and the block that they lie in, None where they lie in
        the pool. Nobody else writes the block while anything refers to one of these arrays. Raises HandoffFailed where
        no block comes free."""
        ...


class PageWriter(Protocol):
    """Writes pages for a receiver."""

    def write(self, page: int, part: Part, source: ByteArray) -> ByteArray:
        """Copy what came into a part of an own page, and zero what did not. Return the bytes that the page gets, for
        their digest: good until the next call. On a GPU the page has them when the stream is done."""
        ...


def reader_of(pool: KVPool, gpu: Gpu | None = None) -> PageReader:
    """`gpu`: that of a pool on one; torch.cuda if None."""
    return HostReader(pool) if pool.device.type == "cpu" else PinnedReader(pool, gpu or TorchCuda())


def writer_of(pool: KVPool, gpu: Gpu | None = None) -> PageWriter:
    """As reader_of."""
    return HostWriter(pool) if pool.device.type == "cpu" else PinnedWriter(pool, gpu or TorchCuda())


class HostReader:
    """Gives views of the pool. A later read sees what the pages hold then."""

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
    """Copies of pages as they are when the stream comes to them. Blocks the calling thread until they are there."""

    def __init__(
        self, pool: KVPool, gpu: Gpu, *, most_bytes: int = MAX_BLOCK_BYTES, patience_s: float = PATIENCE_S
    ) -> None:
        size = max(READY_BYTES, pool.page_bytes)
        self._pool = pool
        self._gpu = gpu
        self.num_blocks = max(1, most_bytes // size)
        self._blocks = Blocks(lambda: gpu.pinned((size,), torch.uint8), size, self.num_blocks, patience_s)

    def read(self, pages: Sequence[int], where: slice) -> tuple[list[ByteArray], ByteArray | None]:
        if not pages:
            return [], None
        size = where.stop - where.start
        places = [slice(index * size, (index + 1) * size) for index in range(len(pages))]
        block, lent = self._blocks.take(len(pages) * size)
        for page, place in zip(pages, places, strict=True):
            block[place].copy_(self._pool.pages_bytes[page, where], non_blocking=True)
        copied = self._gpu.new_event(blocking=True)
        copied.record(self._gpu.current_stream(self._pool.device))
        copied.synchronize()
        return [lent[place] for place in places], lent


class Blocks:
    """Owner of a sender's pinned blocks, `most` at the most, each made when it is first needed and kept. A block comes
    back when nothing refers to what `take` gave, nor to a part of it: a frame keeps it while libzmq may read it."""

    def __init__(self, make: Callable[[], torch.Tensor], block_bytes: int, most: int, patience_s: float) -> None:
        self._make = make
        self._block_bytes = block_bytes
        self._most = most
        self._patience_s = patience_s
        self._back: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()  # filled by any thread, and by the collector
        self._num_made = 0

    def take(self, num_bytes: int) -> tuple[torch.Tensor, ByteArray]:
        """A block, to copy into on one stream only, and its memory, to be lent on. Blocks the calling thread while all
        are lent; HandoffFailed when none comes back, or for more than a block has."""
        if num_bytes > self._block_bytes:
            raise HandoffFailed(f"{num_bytes} bytes in one message, where {self._block_bytes} fit")
        block = self._next()
        lent: ByteArray = block.numpy()  # an object of its own each time: views of it keep it, and nothing else
        weakref.finalize(lent, self._back.put, block).atexit = False
        return block, lent

    def _next(self) -> torch.Tensor:
        if self._num_made < self._most and self._back.empty():
            self._num_made += 1
            with torch.inference_mode(False):  # a block outlives the closure that asks for it
                return self._make()
        try:
            return self._back.get(timeout=self._patience_s)
        except queue.Empty:
            held = f"{self._most} blocks of {self._block_bytes} bytes"
            raise HandoffFailed(f"peers have not read {held} for {self._patience_s:g} s") from None


@dataclass(frozen=True, slots=True)
class Slot:
    """memory: (page_bytes,) uint8, pinned; host: the same, for numpy. `copied`: it was read."""

    memory: torch.Tensor
    host: ByteArray
    copied: GpuEvent


class PinnedWriter:
    """Owner of a receiver's pinned slots, which are used in turns."""

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
