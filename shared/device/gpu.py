"""What Baton asks of a GPU's runtime, in one narrow face: `Gpu`. TorchCuda (torch_cuda.py) is the real one and the only
file that names `torch.cuda`; the tests have a virtual one. Knows nothing of what is computed.
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
    """A mark in a stream of the device. One that was never recorded counts as reached."""

    def record(self, stream: GpuStream | None = None) -> None:
        """The mark is where the stream is now, the calling thread's current one by default."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread, without the GIL, until the device got there. Raises the device's fault."""
        ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: GpuEvent) -> float:
        """Milliseconds; both made with `timing` and reached, or it raises RuntimeError."""
        ...


class GpuStream(Protocol):
    """A queue of the device. Its work runs in order; only events order it beside other queues."""

    @property
    def cuda_stream(self) -> int:
        """The handle. Two objects with one handle are one queue."""
        ...

    def wait_event(self, event: GpuEvent) -> None:
        """Order only: what is enqueued from now on runs after the event's newest mark. The host goes on."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread until all that is enqueued has run. Raises the device's fault."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Of one device, all its processes together."""

    free_bytes: int
    total_bytes: int


def gib(num_bytes: int) -> str:
    """As a person reads it."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / MIB:.2f} MiB"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """By tensors of this process on one device."""

    allocated_bytes: int
    peak_bytes: int  # the most since `forget_peak`


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """`capability`: major and minor, of what it can compute. `peers`: devices whose memory it can map, by number."""

    name: str
    capability: tuple[int, int]
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """What another process needs to open a block of device memory: torch's own fields, in torch's order."""

    device: int
    storage: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


class GpuGraph(Protocol):
    """What was captured: launches with the addresses they had. Replays of graphs that share memory must be ordered."""

    def replay(self) -> None:
        """Enqueue all of it on the current stream, by one call. It reads and writes the memory that it was captured
        with, so that must live, and what a replay left there is overwritten by the next."""
        ...

    def reset(self) -> None:
        """Let go of it and of its share of the memory. It is not replayed again."""
        ...


class Gpu(Protocol):
    """Any thread may call. Current device, stream and grad mode belong to the calling thread, as torch has it."""

    def is_available(self) -> bool: ...

    def device_count(self) -> int: ...

    def current_device(self) -> torch.device: ...

    def use_device(self, device: torch.device) -> Context: ...

    def uuid(self, device: torch.device) -> str:
        """The same in every process, whatever number it has there."""
        ...

    def memory_info(self, device: torch.device) -> MemoryInfo: ...

    def memory_use(self, device: torch.device) -> MemoryUse: ...

    def forget_peak(self, device: torch.device) -> None:
        """The peak is what is allocated now."""
        ...

    def release_cached(self, device: torch.device) -> None:
        """Give memory that no tensor uses back to the driver: `memory_info` counts it as free then."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Blocks until every stream of the device is empty."""
        ...

    def new_stream(self, device: torch.device, priority: int = 0) -> GpuStream:
        """From a pool that goes round: the same handle may come again."""
        ...

    def current_stream(self, device: torch.device) -> GpuStream: ...

    def use_stream(self, stream: GpuStream) -> Context: ...

    def new_event(self, *, timing: bool = False, blocking: bool = False) -> GpuEvent:
        """`blocking`: who synchronises with it sleeps and does not spin."""
        ...

    def closure_mode(self) -> Context:
        """The grad mode that a stream's closures run in."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory, not initialised, that asynchronous copies may read and write."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: GpuStream) -> None:
        """The tensor's memory, once freed, is not used again before `stream` has done what it was given until then."""
        ...

    def new_graph_memory(self) -> object:
        """What graphs take the memory from that is allocated while they are captured. Graphs captured one after another
        may share it: what has been freed by then is used again, for replays of one do not overlap those of another."""
        ...

    def capture(self, memory: object) -> AbstractContextManager[GpuGraph]:
        """Within: what the calling thread enqueues on its current stream, and on streams that wait for it and that it
        waits for in turn, goes into the graph and does not run. Raises, there or at the end, for whatever makes the
        host wait, for other memory than `memory`, copies from or into pageable memory, questions to events, and
        streams that are left behind. Other threads may do what they like."""
        ...

    def share(self, tensor: torch.Tensor) -> SharedBlock:
        """The whole block under `tensor`; it must have been allocated whole (no expandable segments)."""
        ...

    def open_shared(self, block: SharedBlock) -> torch.Tensor:
        """(storage_bytes,) uint8: another process's memory, unmapped when the last tensor on it is gone."""
        ...

    def describe(self, device: torch.device) -> DeviceInfo: ...

    def built_for(self) -> str:
        """CUDA's version that torch was built for; empty: it was built without."""
        ...
