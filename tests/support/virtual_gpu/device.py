"""A GPU that is none: it implements `shared.device.gpu.Gpu`, and torch's tensors say that they are on it.

    device = make_device(mode="deferring", seed=3)
    streams = make_streams("cuda", gpu=device)
    x = torch.arange(4).to(device.device)             # counted: a copy out of pageable memory
    with device.counting() as counts:
        y = (x * 2).cpu()
    assert counts.syncs == 1, counts.by_place

eager: a launch runs at once. This mode counts crossings and keeps CUDA's rules.
deferring: a launch runs later. The seed draws one of the orders that waits, events and synchronize allow. Copies read
pinned memory when they run, freed memory is overwritten in the order of its stream, and torch's race detector watches.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from shared.device.gpu import Context, DeviceInfo, MemoryInfo, MemoryUse, SharedBlock
from tests.support.virtual_gpu import backend
from tests.support.virtual_gpu.blocks import POISON, Block, block_of, extent, first_byte, hear_freed, rounded, wrap
from tests.support.virtual_gpu.crossings import Counts, Crossings
from tests.support.virtual_gpu.failures import Failures
from tests.support.virtual_gpu.graph import Captured, Captures, GraphMemory, VirtualGraph
from tests.support.virtual_gpu.operators import KIND
from tests.support.virtual_gpu.queues import Kernel, Mark, Queue, Queues, Wait
from tests.support.virtual_gpu.races import Races

FIRST_HANDLE = 1000
GIB = 1 << 30


class VirtualStream:
    """Handle 0 is the default stream, ordered beside the others by events only: torch's pool is non-blocking."""

    def __init__(self, gpu: VirtualGpu, handle: int) -> None:
        self.cuda_stream = handle
        self.device = gpu.device
        self.queue: Queue = gpu.queues.add(f"stream {handle}")
        self._gpu = gpu

    def wait_event(self, event: VirtualEvent) -> None:
        gpu = self._gpu
        gpu.failures.meet("wait")
        with gpu.queues.lock:
            if gpu.captures.wait(self.cuda_stream, event.captured, event.mark is not None):
                return
            if event.mark is not None:
                gpu.queues.put(self.queue, Wait(event.mark))
                gpu.watch(lambda races: races.waited(event.number, self.cuda_stream))

    def synchronize(self) -> None:
        self._gpu.crossings.note("waits", "stream")
        self._gpu.wait_for_stream(self)

    def query(self) -> bool:
        return self._gpu.queues.is_reached(self._gpu.queues.put_mark(self.queue))


class VirtualEvent:
    def __init__(self, gpu: VirtualGpu, timing: bool, blocking: bool) -> None:
        self.number = next(gpu.numbers)
        self.mark: Mark | None = None
        self.captured: Captured | None = None  # recorded while a stream was captured
        self._gpu = gpu
        self._timing = timing
        self._blocking = blocking

    def record(self, stream: VirtualStream | None = None) -> None:
        gpu = self._gpu
        stream = stream or gpu.current_stream()
        with gpu.queues.lock:
            self.captured = gpu.captures.record(stream.cuda_stream)
            if self.captured is not None:
                return
            self.mark = gpu.queues.put_mark(stream.queue)
            gpu.watch(lambda races: races.recorded(self.number, stream.cuda_stream))

    def synchronize(self) -> None:
        gpu = self._gpu
        gpu.crossings.note("waits", "event")
        gpu.failures.meet("event")
        if self.mark is not None:
            gpu.queues.wait_for(self.mark, sleepily=self._blocking)
            gpu.watch(lambda races: races.synchronized_event(self.number))

    def query(self) -> bool:
        self._gpu.captures.meet("queries", "event")
        return self.mark is None or self._gpu.queues.is_reached(self.mark)

    def elapsed_time(self, end_event: VirtualEvent) -> float:
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.mark is None or end_event.mark is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.mark.done and end_event.mark.done):
            raise torch.AcceleratorError("CUDA error: device not ready")
        return (end_event.mark.time_s - self.mark.time_s) * 1000

    def __del__(self) -> None:
        self._gpu.gone_events.append(self.number)


@dataclass(frozen=True, slots=True)
class Exported:
    block: Block
    event: VirtualEvent


class VirtualGpu:
    """`races`: what torch's sanitizer has found, a line each; they are raised where they are found, too."""

    def __init__(
        self,
        index: int,
        mode: str,
        seed: int,
        laziness: float | None,
        sanitize: bool,
        memory_bytes: int,
        pool_size: int,
    ) -> None:
        assert mode in ("eager", "deferring"), mode
        self.device = torch.device(KIND, index)
        self.queues = Queues(seed, mode == "deferring", laziness)
        self.captures = Captures(self)
        self.crossings = Crossings(self.captures.meet)
        self.numbers = itertools.count(1)
        self.gone_events: deque[int] = deque()
        self._races = Races() if sanitize else None
        self._streams = {0: VirtualStream(self, 0)}
        self.pool: Iterator[int] = itertools.cycle(range(FIRST_HANDLE, FIRST_HANDLE + pool_size))
        self._of_thread = threading.local()
        self._gone: deque[Block] = deque()
        self._free: dict[tuple[int, int], list[Block]] = defaultdict(list)  # by stream and size
        self._lent: list[tuple[Block, list[Mark]]] = []
        self._memory_bytes, self._reserved_bytes = memory_bytes, 0
        self._allocated_bytes = self._peak_bytes = 0
        self._pinned: dict[int, int] = {}  # address: bytes
        self._exported: dict[bytes, Exported] = {}
        self.failures = Failures(self.queues)

    # What the tests ask

    @property
    def races(self) -> list[str]:
        return self._races.found if self._races else []

    def counting(self) -> AbstractContextManager[Counts]:
        return self.crossings.counting()

    def held(self) -> AbstractContextManager[None]:
        """Nothing runs but by `run` and where the calling thread waits. Other threads that wait stay where they are."""
        return self.queues.held()

    def run(self, stream: VirtualStream, count: int | None = None) -> int:
        """Under `held`: run up to `count` items of one stream, or all that can; how many it were."""
        return self.queues.run(stream.queue, count)

    def break_down(self, error: BaseException) -> None:
        """As a kernel that reads an illegal address: every later call of the device raises."""
        self.queues.fault = error

    # The face `Gpu`

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return self.device

    def use_device(self, device: torch.device) -> Context:
        assert device == self.device, device
        return nullcontext()

    def uuid(self, device: torch.device) -> str:
        return f"virtual-{device.index}"

    def memory_info(self, device: torch.device) -> MemoryInfo:
        return MemoryInfo(self._memory_bytes - self._reserved_bytes, self._memory_bytes)

    def memory_use(self, device: torch.device) -> MemoryUse:
        with self.queues.lock:
            self.take_back()
            return MemoryUse(self._allocated_bytes, self._peak_bytes)

    def forget_peak(self, device: torch.device) -> None:
        with self.queues.lock:
            self.take_back()
            self._peak_bytes = self._allocated_bytes

    def release_cached(self, device: torch.device) -> None:
        """As far as streams are done with it."""
        with self.queues.lock:
            self.take_back()
            self._let_go()

    def synchronize(self, device: torch.device) -> None:
        self.crossings.note("waits", "device")
        self.queues.drain()
        self.watch(lambda races: races.synchronized())

    def new_stream(self, device: torch.device) -> VirtualStream:
        with self.queues.lock:
            handle = next(self.pool)
            if handle not in self._streams:
                self._streams[handle] = VirtualStream(self, handle)
                self.watch(lambda races: races.made_stream(handle))
            return self._streams[handle]

    def current_stream(self, device: torch.device | None = None) -> VirtualStream:
        stream: VirtualStream = getattr(self._of_thread, "stream", self._streams[0])
        return stream

    @contextmanager
    def use_stream(self, stream: VirtualStream) -> Iterator[None]:
        self.failures.meet("stream")
        before = self.current_stream()
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def new_event(self, *, timing: bool = False, blocking: bool = False) -> VirtualEvent:
        return VirtualEvent(self, timing, blocking)

    def closure_mode(self) -> Context:
        return torch.inference_mode()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Overwritten, as the real one is not: who reads a copy that has not come yet sees it."""
        self.captures.meet("allocations", "pinned memory")
        memory = np.full(max(1, int(np.prod(shape))) * dtype.itemsize, POISON, np.uint8)
        address = memory.ctypes.data
        self._pinned[address] = memory.nbytes
        weakref.finalize(memory, self._pinned.pop, address, None)
        flat = torch.from_numpy(memory).view(dtype)
        return flat[: int(np.prod(shape))].view(tuple(shape))

    def record_stream(self, tensor: torch.Tensor, stream: VirtualStream) -> None:
        block = block_of(tensor)
        if block is not None and block.handle != stream.cuda_stream:
            block.lent.add(stream.cuda_stream)

    def share(self, tensor: torch.Tensor) -> SharedBlock:
        block = block_of(tensor)
        assert block is not None, "an empty tensor has nothing to share"
        name = b"%d" % next(self.numbers)
        event = self.new_event()
        event.record()
        self._exported[name] = Exported(block, event)
        return SharedBlock(self.device.index, name, tensor.untyped_storage().nbytes(), 0, b"", 0, b"", True)

    def open_shared(self, block: SharedBlock) -> torch.Tensor:
        exported = self._exported.get(block.storage)
        if exported is None:
            raise torch.AcceleratorError("CUDA error: invalid resource handle")
        self.current_stream().wait_event(exported.event)
        with self.queues.lock:
            return self._wrapped(exported.block, (block.storage_bytes,), (1,), torch.uint8)

    def new_graph_memory(self) -> GraphMemory:
        return GraphMemory()

    def capture(self, memory: GraphMemory) -> AbstractContextManager[VirtualGraph]:
        return self.captures.capture(memory)

    def describe(self, device: torch.device) -> DeviceInfo:
        return DeviceInfo("virtual", (9, 0), ())

    def built_for(self) -> str:
        return ""

    # What the backend asks

    @property
    def deferring(self) -> bool:
        return self.queues.deferring

    @property
    def is_late(self) -> bool:
        """Whether what is launched now runs later, if at all."""
        return self.deferring or self.captures.current is not None

    def watch(self, tell: Callable[[Races], None]) -> None:
        """Tell the race detector, if there is one."""
        if self._races is not None:
            with self.queues.lock:
                while self.gone_events:
                    self._races.forgotten(self.gone_events.popleft())
                tell(self._races)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        first = first_byte(tensor)
        starts = list(self._pinned)  # numbers alone: a pair would be garbage that is collected, and its finalizers pop
        return any(start <= first < start + self._pinned.get(start, 0) for start in starts)

    def new_tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """On the current stream; not initialised, so overwritten."""
        num_bytes = rounded(max(1, extent(size, stride)) * dtype.itemsize)
        self.failures.meet("memory")
        with self.queues.lock:
            self.take_back()
            handle = self.current_stream().cuda_stream
            block = self.captures.allocate(handle, num_bytes)
            if block is None:
                free = self._free[handle, num_bytes]
                block = free.pop() if free else self.new_block(num_bytes)
            block.handle = handle
            block.life += 1
            num_bytes = block.num_bytes
            self._allocated_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
            self.watch(lambda races: races.allocated(block.start))
            block.seen.add(block.start)
            return self._wrapped(block, size, stride, dtype)

    def launch(
        self, label: str, run: Callable[[], None], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """As `enqueue`, and counted."""
        self.crossings.note("launches" if self.captures.current is None else "captured", label)
        self.enqueue(label, run, reads, writes)

    def enqueue(
        self, label: str, run: Callable[[], None], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """On the current stream. `run` must not hold tensors of the device: their memory lives as torch says."""
        self.failures.meet("launch")
        stream = self.current_stream()
        with self.queues.lock:
            self.take_back()
            read, written = self.addresses(reads), self.addresses(writes)
            if self.captures.keep(stream.cuda_stream, run, label, (read, written), (*reads, *writes)):
                return
            self.watch(lambda races: races.launched(stream.cuda_stream, read, written, label))
            self.queues.put(stream.queue, Kernel(self.failures.in_work(run, label), label))

    def wait_for_stream(self, stream: VirtualStream | None = None) -> None:
        """The host waits; nothing is counted. Never called under the lock: another thread may hold the device."""
        stream = stream or self.current_stream()
        self.queues.wait_for(self.queues.put_mark(stream.queue))
        self.watch(lambda races: races.synchronized_stream(stream.cuda_stream))

    def addresses(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """For the race detector, where there is one."""
        addresses: set[int] = set()
        for tensor in tensors if self._races else ():
            if (block := block_of(tensor)) is not None:
                address = first_byte(tensor)
                addresses.add(address)
                block.seen.add(address)
        return addresses

    def new_block(self, num_bytes: int) -> Block:
        """What is free but kept is let go where memory is short; not by a capture, as in torch."""
        if self._reserved_bytes + num_bytes > self._memory_bytes and self.captures.current is None:
            self._let_go()
        if self._reserved_bytes + num_bytes > self._memory_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes on {self.device}")
        self._reserved_bytes += num_bytes
        block = Block(num_bytes, self)
        backend.BLOCKS[block.start] = block
        return block

    def _let_go(self) -> None:
        """The blocks that are free are gone."""
        self._free.clear()
        self._reserved_bytes = sum(block.num_bytes for block in backend.BLOCKS.values() if block.owner is self)

    def _wrapped(self, block: Block, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        block.num_users += 1
        return wrap(block, size, stride, dtype, self.device.index, lambda: self._gone.append(block))

    def take_back(self) -> None:
        """Blocks that were freed since the last call, behind what their streams were given until now."""
        hear_freed()
        if not self._gone and not self._lent:
            return
        while self._gone:
            block = self._gone.popleft()
            block.num_users -= 1
            if block.num_users:
                continue
            self._allocated_bytes -= block.num_bytes
            if block.memory_of is not None:  # a graph's: no stream of ours uses it
                block.memory_of.take_back(block)
                continue
            seen, block.seen = block.seen, set()
            self.watch(lambda races, seen=seen: races.freed(seen))
            lent, block.lent = block.lent, set()
            marks = [self.queues.put_mark(self._streams[handle].queue) for handle in lent]
            self._lent.append((block, marks))
        still = [(block, marks) for block, marks in self._lent if not all(mark.done for mark in marks)]
        back = [block for block, marks in self._lent if all(mark.done for mark in marks)]
        self._lent = still
        for block in back:
            overwrite = Kernel(partial(block.memory.fill_, POISON), "free")
            self.queues.put(self._streams[block.handle].queue, overwrite)
            self._free[block.handle, block.num_bytes].append(block)


def make_device(
    mode: str = "eager",
    seed: int = 0,
    *,
    laziness: float | None = None,
    sanitize: bool | None = None,
    memory_bytes: int = 16 * GIB,
    pool_size: int = 32,
) -> VirtualGpu:
    """A fresh device, which takes the place of the process's last one. `laziness`: the share of launches after which
    nothing runs; drawn from the seed when None. `sanitize`: watch for races, by default when deferring. `pool_size`: of
    streams."""
    backend.install()
    watched = mode == "deferring" if sanitize is None else sanitize
    device = VirtualGpu(0, mode, seed, laziness, watched, memory_bytes, pool_size)
    backend.GPUS[0] = device
    return device


def make_devices(count: int, mode: str = "eager", seed: int = 0) -> list[VirtualGpu]:
    """Fresh devices of one process, which take the place of its last ones. Nothing is watched for races."""
    backend.install()
    made = [VirtualGpu(index, mode, seed + index, None, False, 16 * GIB, 32) for index in range(count)]
    backend.GPUS.update(enumerate(made))
    return made
