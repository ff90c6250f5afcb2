"""Define `Gpu`, the interface that Baton needs from a GPU's runtime.

torch_cuda.py implements the interface and is the only file that uses `torch.cuda`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

Context = AbstractContextManager[object, bool | None]
MIB, GIB = 1 << 20, 1 << 30


class GpuEvent(Protocol):
    """A mark in a stream of the device. An unrecorded event counts as reached."""

    def record(self, stream: GpuStream | None = None) -> None:
        """Put the mark behind all work enqueued on `stream`, by default the thread's current stream."""
        ...

    def synchronize(self) -> None:
        """Block, without the GIL, until the device reaches the mark. Raise the device's fault."""
        ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: GpuEvent) -> float:
        """Return the milliseconds to `end_event`.

        Raise RuntimeError unless both marks have `timing` and were reached.
        """
        ...


class GpuStream(Protocol):
    """A queue of the device. Its work runs in order. Only events order the work of two queues."""

    @property
    def cuda_stream(self) -> int:
        """Return the handle, which is equal for objects of one queue."""
        ...

    def wait_event(self, event: GpuEvent) -> None:
        """Make the queue's later work wait for the event's newest mark. The host does not wait."""
        ...

    def synchronize(self) -> None:
        """Block until all enqueued work has run. Raise the device's fault."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    free_bytes: int
    total_bytes: int


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / MIB:.2f} MiB"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of this process's tensors on one device."""

    allocated_bytes: int
    peak_bytes: int  # since `forget_peak`


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """`capability`: (major, minor). `peers`: numbers of devices whose memory this device can map."""

    name: str
    capability: tuple[int, int]
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Lets another process open device memory. The fields are torch's, in torch's order."""

    device: int
    storage: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


class GpuGraph(Protocol):
    """Captured launches and their memory addresses. Replays of graphs that share memory must not overlap."""

    def replay(self) -> None:
        """Enqueue the whole graph on the current stream.

        The captured memory must stay allocated. The next replay overwrites the results.
        """
        ...

    def reset(self) -> None:
        """Free the graph, and its part of the memory pool."""
        ...


class Gpu(Protocol):
    """A GPU runtime that any thread may use. Current device, stream and grad mode are thread-local, as in torch."""

    def is_available(self) -> bool: ...

    def device_count(self) -> int: ...

    def current_device(self) -> torch.device: ...

    def use_device(self, device: torch.device) -> Context: ...

    def uuid(self, device: torch.device) -> str:
        """Return an id that is the same in every process."""
        ...

    def memory_info(self, device: torch.device) -> MemoryInfo: ...

    def memory_use(self, device: torch.device) -> MemoryUse: ...

    def forget_peak(self, device: torch.device) -> None:
        """Reset the peak to the memory allocated now."""
        ...

    def release_cached(self, device: torch.device) -> None:
        """Return unused cached memory to the driver, which then counts it as free."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Block until every stream of the device is empty."""
        ...

    def new_stream(self, device: torch.device) -> GpuStream:
        """Return a stream from a round-robin pool, so handles may repeat."""
        ...

    def current_stream(self, device: torch.device) -> GpuStream: ...

    def use_stream(self, stream: GpuStream) -> Context: ...

    def new_event(self, *, timing: bool = False, blocking: bool = False) -> GpuEvent:
        """`blocking`: whether the event's `synchronize` sleeps instead of spinning."""
        ...

    def closure_mode(self) -> Context:
        """Return a context that sets the closures' grad mode."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory for asynchronous copies."""
        ...

    def new_graph_memory(self) -> object:
        """Return a memory pool, which graphs captured one after another may share."""
        ...

    def capture(self, memory: object) -> AbstractContextManager[GpuGraph]:
        """Capture all work that the calling thread enqueues within the context, instead of running it.

        The graph has the work of the thread's current stream, and of streams forked from it and joined again. Raise,
        immediately or at the context's end, for these: host waits, allocations outside `memory`, copies to or from
        pageable memory, event queries, and streams not joined again. Other threads are not restricted.
        """
        ...

    def share(self, tensor: torch.Tensor) -> SharedBlock:
        """Share the whole memory block of `tensor`, which must be one allocation (no expandable segments)."""
        ...

    def open_shared(self, block: SharedBlock) -> torch.Tensor:
        """Return another process's memory as (storage_bytes,) uint8. Freeing the last tensor unmaps this memory."""
        ...

    def describe(self, device: torch.device) -> DeviceInfo: ...

    def built_for(self) -> str:
        """Return torch's CUDA version, or "" without CUDA."""
        ...


def devices(gpu: Gpu) -> list[torch.device]:
    """Return all devices that this process sees."""
    kind = gpu.current_device().type
    return [torch.device(kind, number) for number in range(gpu.device_count())]
