"""Graphs of a virtual GPU: the launches of a region, kept with the memory they had, and run again on it.

    with gpu.capture(memory) as graph:     nothing runs in here
        y = x * 2                          kept: the operator, where x lies and where y will
    graph.replay()                         runs it, on what lies in x by now

Memory that is freed while a graph is captured is handed out again at once, to later launches of it and to later graphs
of the same memory, the smallest that is large enough; each replay overwrites it where it was freed. What a real capture
does not survive raises here, with the line that asked for it. Branches on several streams are kept in the order in
which they were launched; a real graph may run them in another.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from tests.support.virtual_gpu.blocks import POISON, Block, block_of
from tests.support.virtual_gpu.crossings import place
from tests.support.virtual_gpu.queues import Kernel

if TYPE_CHECKING:
    from tests.support.virtual_gpu.device import VirtualGpu

REFUSED = {
    "syncs": "the host would wait",
    "waits": "the host would wait",
    "h2d_pageable": "a copy out of pageable memory",
    "undeferred": "(a gap of the virtual GPU) a result of unknown shape",
    "queries": "a question to the device",
    "allocations": "memory from elsewhere than the graph's",
}
Clock = dict[int, int]  # by handle of a stream: how much of its captured work is behind a point


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch of a graph. `reads` and `writes`: addresses, for the race detector."""

    run: Callable[[], None]
    label: str
    reads: frozenset[int]
    writes: frozenset[int]


class GraphMemory:
    """Shared by graphs that are captured one after another. `is_gone`: its only graph failed, and took it along."""

    def __init__(self) -> None:
        self.is_gone = False
        self.num_whole = 0
        self.blocks: list[Block] = []
        self.capture: Capture | None = None  # under way
        self._free: list[Block] = []

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)

    def take(self, num_bytes: int, make: Callable[[int], Block]) -> Block:
        fitting = [block for block in self._free if block.num_bytes >= num_bytes]
        if fitting:
            block = min(reversed(fitting), key=lambda block: block.num_bytes)
            self._free.remove(block)
            return block
        block = make(num_bytes)
        block.memory_of = self
        self.blocks.append(block)
        return block

    def take_back(self, block: Block) -> None:
        self._free.append(block)
        if self.capture is not None:
            overwrite = partial(block.memory.fill_, POISON)
            self.capture.graph.launches.append(Launched(overwrite, "free", frozenset(), frozenset({block.start})))


class VirtualGraph:
    """`launches` in the order of their capture. `borrowed`: blocks of others that they use, and their lives."""

    def __init__(self, gpu: VirtualGpu, memory: GraphMemory) -> None:
        self.launches: list[Launched] = []
        self.borrowed: dict[int, tuple[weakref.ref[Block], int]] = {}
        self.is_whole = False
        self._gpu = gpu
        self._memory: GraphMemory | None = memory

    def replay(self) -> None:
        gpu = self._gpu
        gpu.failures.meet("launch")
        if not self.is_whole or self._memory is None:
            raise torch.AcceleratorError("CUDA error: the graph was never captured to its end, or was reset")
        gpu.crossings.note("replays", "graph")
        stream = gpu.current_stream()
        with gpu.queues.lock:
            gpu.take_back()
            for block, life in self.borrowed.values():
                found = block()
                if found is None or found.life != life or not found.num_users:
                    raise AssertionError(f"a graph uses memory that was freed since its capture; replayed at {place()}")
            for one in self.launches:
                gpu.watch(
                    lambda races, one=one: races.launched(stream.cuda_stream, {*one.reads}, {*one.writes}, one.label)
                )
                gpu.queues.put(stream.queue, Kernel(gpu.failures.in_work(one.run, one.label), one.label))

    def reset(self) -> None:
        self._memory = None
        self.launches.clear()
        self.borrowed.clear()


@dataclass(slots=True, eq=False)
class Capture:
    """Under way, by one thread, from the stream `origin` on."""

    graph: VirtualGraph
    memory: GraphMemory
    origin: int
    clocks: dict[int, Clock] = field(default_factory=dict)  # of the streams that it has
    broken: str = ""  # why it is of no use any more

    def refuse(self, what: str) -> None:
        self.broken = self.broken or f"{what}, at {place()}"
        raise torch.AcceleratorError(f"CUDA error: operation not permitted when stream is capturing: {what}, {place()}")

    def end(self) -> None:
        if self.broken:
            raise torch.AcceleratorError(f"CUDA error: capture was invalidated: {self.broken}")
        known = self.clocks[self.origin]
        lost = [handle for handle, clock in self.clocks.items() if clock[handle] > known.get(handle, -1)]
        if lost:
            raise torch.AcceleratorError(f"CUDA error: capture has unjoined work on streams {lost}, at {place()}")
        self.graph.is_whole = True


@dataclass(frozen=True, slots=True)
class Captured:
    """Where an event was recorded: a point of a capture, which means nothing outside of it."""

    capture: Capture
    clock: Clock


class Captures:
    """Of one device: the capture that each thread is in, and the kernels that there are."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._of_thread = threading.local()
        self._compiled: set[str] = set()

    @property
    def current(self) -> Capture | None:
        found: Capture | None = getattr(self._of_thread, "capture", None)
        return found

    @contextmanager
    def capture(self, memory: GraphMemory) -> Iterator[VirtualGraph]:
        gpu, origin = self._gpu, self._gpu.current_stream().cuda_stream
        if self.current is not None or memory.capture is not None or origin == 0:
            raise torch.AcceleratorError("CUDA error: no capture begins in another, nor on the default stream")
        if memory.is_gone:
            raise RuntimeError("this pool of memory went with the only graph that used it: take a new one")
        capture = Capture(VirtualGraph(gpu, memory), memory, origin, {origin: {origin: 0}})
        with gpu.queues.lock:
            gpu.take_back()
            self._of_thread.capture = memory.capture = capture
        try:
            yield capture.graph
            with gpu.queues.lock:
                gpu.take_back()
            capture.end()
            memory.num_whole += 1
        finally:
            self._of_thread.capture = memory.capture = None
            memory.is_gone = not memory.num_whole

    def compile(self, kernel: str) -> None:
        """A kernel is about to be launched, in a form that it may not have been compiled or tuned for yet."""
        if kernel in self._compiled:
            return
        if self.current is not None:
            self.current.refuse(f"the first compilation or tuning of {kernel}")
        self._compiled.add(kernel)

    def meet(self, kind: str, operation: str) -> None:
        """Something crosses, or is asked."""
        if kind in REFUSED and self.current is not None:
            self.current.refuse(f"{REFUSED[kind]} ({operation})")

    def keep(
        self,
        handle: int,
        run: Callable[[], None],
        label: str,
        addresses: tuple[set[int], set[int]],
        tensors: Sequence[torch.Tensor],
    ) -> bool:
        """Whether the launch on that stream went into a graph."""
        capture = self.current
        if capture is None:
            return False
        if handle not in capture.clocks:
            capture.refuse(f"{label} on stream {handle}, which the capture does not have")
        capture.clocks[handle][handle] += 1
        for tensor in tensors:
            block = block_of(tensor)
            if block is not None and block.memory_of is not capture.memory:
                capture.graph.borrowed[block.start] = weakref.ref(block), block.life
        reads, writes = addresses
        capture.graph.launches.append(Launched(run, label, frozenset(reads), frozenset(writes)))
        return True

    def allocate(self, handle: int, num_bytes: int) -> Block | None:
        """Out of the graph's memory; None: nothing is captured."""
        capture = self.current
        if capture is None:
            return None
        if handle not in capture.clocks:
            capture.refuse(f"{REFUSED['allocations']} (stream {handle})")
        return capture.memory.take(num_bytes, self._gpu.new_block)

    def record(self, handle: int) -> Captured | None:
        """An event is recorded on the stream."""
        capture = self.current
        if capture is None or handle not in capture.clocks:
            return None
        return Captured(capture, dict(capture.clocks[handle]))

    def wait(self, handle: int, event: Captured | None, is_marked: bool) -> bool:
        """A stream waits for an event; whether that is of a capture, which the stream has joined then."""
        capture = self.current
        if event is not None and (capture is None or event.capture is not capture):
            raise torch.AcceleratorError(f"CUDA error: a wait for an event of another capture, at {place()}")
        if capture is None or (event is None and handle not in capture.clocks):
            return False
        if event is None:
            if is_marked:
                capture.refuse(f"stream {handle} waits for what was not captured")
            return True
        clock = capture.clocks.setdefault(handle, {handle: 0})
        for stream, count in event.clock.items():
            clock[stream] = max(clock.get(stream, 0), count)
        return True
