"""Run tensor parallelism inside a node whose ranks have a GPU each. Rank 0 decides, as in tp.py.

    rank 0    order ->| numbers | forward on its GPU, with its own pages | sampling ...
    rank 1       `--->| numbers | forward on its GPU, with its own pages | next order ...

A rank's pages have the KV heads that the rank computes, and the same numbers on all ranks: rank 0 gives them away. An
order goes through a socket and says shapes. What only the device knows, such as the tokens that the last step drew,
follows through the group in one piece. So no host waits for its device, and hosts run ahead of them. Nothing is shared,
so a step ends without a barrier.

Hand-offs read and write whole pages, which are the parts of all ranks. A follower obeys in the order in which orders
come. So what it reads is behind, and what it is given is ahead of, the same steps as on rank 0.
"""

from __future__ import annotations

import contextlib
import gc
import math
import socket
import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from shared.core.errors import RankLost
from shared.device.gpu import Gpu
from shared.device.group import RankGroup
from shared.kv.layout import page_bytes
from shared.kv.pool import ByteArray, KVPool
from shared.model.math.interface import Model, ModelInputs, ModelOutput
from shared.ranks.orders import (
    DeviceOrder,
    Done,
    Forward,
    PageBytes,
    Pages,
    RankUse,
    ReadPages,
    WritePage,
    hear,
    hear_order,
    tell,
)
from shared.ranks.tp import DTYPES, out_of_step

Array = npt.NDArray[Any]
Packed = tuple[str, tuple[int, ...], bytes]
ARRAY = "array "  # begins the dtype of an array of the host


class DeviceRanks:
    """Rank 0's side of a step, on the forward stream only, and of the pages (OtherParts), on the transfer stream."""

    def __init__(self, group: RankGroup, followers: Sequence[socket.socket]) -> None:
        self.num = len(followers)
        self._group = group
        self._followers = followers
        self._telling = threading.Lock()  # two threads order; all followers hear the same sequence

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """Enqueue model.forward(inputs, kv) on all ranks. Raises RankLost on any failure."""
        order, numbers = order_of(inputs)
        self._tell_all([order] * self.num)
        try:
            self._group.broadcast(numbers)
            return model.forward(inputs, kv)
        except RankLost:
            raise
        except Exception as error:
            raise out_of_step(error) from error

    def read(self, pages: Sequence[int], where: slice) -> list[ByteArray]:
        self._tell_all([ReadPages(list(pages), where.start, where.stop)] * self.num)
        with self._all_end_with_one():
            return [self._hear_bytes(follower, len(pages), where) for follower in self._followers]

    def _hear_bytes(self, follower: socket.socket, num_pages: int, where: slice) -> ByteArray:
        answer = hear(follower, PageBytes)
        if answer is None or len(answer.data) != num_pages * (where.stop - where.start):
            raise RankLost("another rank of this node did not send its pages")
        return np.frombuffer(answer.data, np.uint8).reshape(num_pages, -1)

    def write(self, page: int, where: slice, parts: ByteArray) -> None:
        self._tell_all([WritePage(page, where.start, part.tobytes()) for part in parts])

    def _tell_all(self, orders: Sequence[DeviceOrder]) -> None:
        """Send each follower its order."""
        with self._telling, self._all_end_with_one():
            for follower, order in zip(self._followers, orders, strict=True):
                tell(follower, order)

    @contextlib.contextmanager
    def _all_end_with_one(self) -> Generator[None, None, None]:
        """End the followers, and with them the node, once one is lost. A failed hand-off alone would not end the node,
        and a late answer, or the rest of an order, would be taken for the next one."""
        try:
            yield
        except RankLost:
            for follower in self._followers:
                with contextlib.suppress(OSError):  # it has gone
                    follower.shutdown(socket.SHUT_RDWR)
            raise


class DeviceFollower:
    """Obeys DeviceRanks with a part of a model, on one GPU."""

    def __init__(self, group: RankGroup, model: Model, device: torch.device, gpu: Gpu) -> None:
        self.model = model
        self._group, self._device, self._gpu = group, device, gpu
        self._pool: KVPool | None = None
        gpu.release_cached(device)
        self._weights = gpu.memory_use(device).allocated_bytes
        gpu.forget_peak(device)

    def follow(self, orders: socket.socket, silence_s: float) -> None:
        """Obey until rank 0 closes the socket between two steps. Raises RankLost.

        `silence_s`: seconds that ranks wait for each other once memory is measured."""
        with self._gpu.closure_mode():
            while (order := hear_order(orders)) is not None:
                if isinstance(order, Forward):
                    self._forward(order)
                elif isinstance(order, WritePage):
                    self._write_page(order)
                elif isinstance(order, ReadPages):
                    tell(orders, self._read_pages(order))
                elif isinstance(order, Pages):
                    self._make_pool(order)
                    tell(orders, Done())
                else:
                    tell(orders, self._use())
                    self._group.be_patient(silence_s)

    def _forward(self, order: Forward) -> None:
        numbers = torch.empty(order.num_numbers, dtype=torch.int64, device=self._device)
        self._group.broadcast(numbers)
        self.model.forward(inputs_of(order, numbers), self._pages)

    def _read_pages(self, order: ReadPages) -> PageBytes:
        """Wait for the device."""
        parts = [self._pages.pages_bytes[page, order.start : order.stop] for page in order.pages]
        return PageBytes(torch.cat(parts).cpu().numpy().tobytes())

    def _write_page(self, order: WritePage) -> None:
        source = torch.frombuffer(bytearray(order.data), dtype=torch.uint8)
        self._pages.pages_bytes[order.page, order.start : order.start + len(source)].copy_(source)

    @property
    def _pages(self) -> KVPool:
        if self._pool is None:
            raise RankLost("an order came before there were pages")
        return self._pool

    def _make_pool(self, pages: Pages) -> None:
        if self._pool is not None:
            self._pool.close()
        planes = self.model.kv_planes(pages.page_size)
        if page_bytes(planes) != pages.page_bytes:
            raise RankLost(f"this rank's pages have {page_bytes(planes)} bytes, and rank 0's {pages.page_bytes}")
        self._pool = KVPool(planes, pages.num_pages, pages.page_size, device=self._device)

    def _use(self) -> RankUse:
        """Return the memory that this rank used, as `measure_use` in shared/node/assembly/gpu_memory.py does for rank
        0."""
        gpu, device = self._gpu, self._device
        gpu.synchronize(device)
        step = gpu.memory_use(device).peak_bytes - self._weights
        gc.collect()
        gpu.release_cached(device)
        info = gpu.memory_info(device)
        return RankUse(info.total_bytes, info.free_bytes, self._weights, step)


def order_of(inputs: ModelInputs) -> tuple[Forward, torch.Tensor]:
    """Return the order, and the numbers (n,) int64 of all its tensors, on the device."""
    tensors: list[torch.Tensor] = []

    def pack(value: torch.Tensor | Array) -> Packed:
        if isinstance(value, np.ndarray):
            return ARRAY + str(value.dtype), value.shape, value.tobytes()
        tensors.append(value)
        return str(value.dtype), tuple(value.shape), b""

    packed = msgspec.msgpack.encode(replace(inputs, layers=None), enc_hook=pack)
    numbers = torch.cat([tensor.reshape(-1).long() for tensor in tensors])
    return Forward(packed, len(numbers)), numbers


def inputs_of(order: Forward, numbers: torch.Tensor) -> ModelInputs:
    begin = 0

    def unpack(kind: type, packed: Packed) -> torch.Tensor | Array:
        nonlocal begin
        name, shape, data = packed
        if name.startswith(ARRAY):
            return np.frombuffer(data, name.removeprefix(ARRAY)).reshape(shape).copy()
        own = numbers[begin : begin + math.prod(shape)]
        begin += math.prod(shape)
        return own.to(DTYPES[name]).view(tuple(shape))

    return msgspec.msgpack.decode(order.inputs, type=ModelInputs, dec_hook=unpack)
