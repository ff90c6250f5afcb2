"""The queues of a virtual GPU: what was launched, marks and waits, run by whoever launches or waits.

Eager: an item runs when it is put in. Deferring: items wait; whoever puts one in or waits for a mark runs some, stream
by stream as the seed says, only as far as marks and waits allow. So everything that is not ordered happens in the wrong
order under some seed. Priorities with rare changes find orders that uniform choice misses (as in simulated.py). Knows
nothing of tensors.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

LAZINESS = (0.0, 0.5, 0.8, 0.95, 1.0)
CHANGE_RATES = (0.0, 0.05, 0.2, 0.5)
RUN_LENGTHS = (1, 2, 5, 20)
FRUITLESS_POLLS = 8  # a host that only polls must still see the device move
PACES_S = (0.0, 0.0002, 0.001)  # what a sleeping waiter leaves to the host's thread between two items
HELD_PACE_S = 0.0005  # between two looks of a waiter while another thread holds the device


class Mark:
    """Where a stream was. `time_s` is set when the device gets there."""

    __slots__ = ("done", "time_s")

    def __init__(self) -> None:
        self.done = False
        self.time_s = 0.0


class Kernel:
    """Work. `run` touches host memory only: that of the device's blocks, and pinned memory."""

    __slots__ = ("label", "run")

    def __init__(self, run: Callable[[], None], label: str) -> None:
        self.run = run
        self.label = label


class Wait:
    __slots__ = ("mark",)

    def __init__(self, mark: Mark) -> None:
        self.mark = mark


Item = Kernel | Mark | Wait


class Queue:
    """Of one stream."""

    def __init__(self, name: str, priority: float) -> None:
        self.name = name
        self.priority = priority
        self.items: deque[Item] = deque()

    def can_run(self) -> bool:
        """Waits for marks that are reached are passed for free."""
        while self.items and isinstance(head := self.items[0], Wait) and head.mark.done:
            self.items.popleft()
        return bool(self.items) and not isinstance(self.items[0], Wait)


class Queues:
    """All of one device. `fault`: what a kernel raised; the device is of no use any more, as a real one's context."""

    def __init__(self, seed: int, deferring: bool, laziness: float | None = None) -> None:
        self.lock = threading.RLock()
        self.deferring = deferring
        self.fault: BaseException | None = None
        self._random = random.Random(seed)
        drawn = self._random.choice(LAZINESS)
        self.laziness = drawn if laziness is None else laziness
        self._change_rate = self._random.choice(CHANGE_RATES)
        self._pace_s = self._random.choice(PACES_S)
        self._queues: list[Queue] = []
        self._holder: int | None = None  # the thread that drives alone
        self._polls = 0

    def add(self, name: str) -> Queue:
        with self.lock:
            queue = Queue(name, self._random.random())
            self._queues.append(queue)
        return queue

    def put(self, queue: Queue, item: Item) -> None:
        with self.lock:
            self._raise_fault()
            queue.items.append(item)
            if not self.deferring:
                self._run_all(queue)
                self._raise_fault()
            elif self._holder is None:
                self._host_point()

    def put_mark(self, queue: Queue) -> Mark:
        mark = Mark()
        self.put(queue, mark)
        return mark

    def wait_for(self, mark: Mark, *, sleepily: bool = False) -> None:
        """The calling thread waits. `sleepily`: it lets the host's thread do something between two items. Raises the
        device's fault, once the mark is reached."""
        while True:
            with self.lock:
                if mark.done:
                    self._raise_fault()
                    return
                held = self._holder not in (None, threading.get_ident())
                if not held and not self._run_one():
                    raise RuntimeError(f"the virtual GPU is stuck: {self.describe()}")
            if held or sleepily:
                time.sleep(HELD_PACE_S if held else self._pace_s)

    def is_reached(self, mark: Mark) -> bool:
        """The host asks; the device moves a little, for a host that only asks must see it move."""
        with self.lock:
            if not mark.done and self._holder is None:
                self._host_point()
                self._polls += 1
                if not mark.done and self._polls % FRUITLESS_POLLS == 0:
                    self._run_one()
            self._raise_fault()
            return mark.done

    def drain(self) -> None:
        """Until nothing is left. Raises the device's fault."""
        for queue in list(self._queues):
            mark = Mark()
            with self.lock:
                queue.items.append(mark)
                if not self.deferring:
                    self._run_all(queue)
            self.wait_for(mark)

    def run(self, queue: Queue, count: int | None = None) -> int:
        """Run up to `count` items of one stream, or all that can; how many it were. For scripts, under `held`."""
        done = 0
        with self.lock:
            while queue.can_run() and (count is None or done < count):
                self._run_head(queue)
                done += 1
        return done

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing runs but by `run` and by waits of the calling thread; other threads that wait stay where they are."""
        with self.lock:
            self._holder = threading.get_ident()
        try:
            yield
        finally:
            with self.lock:
                self._holder = None

    def describe(self) -> str:
        return ", ".join(f"{queue.name} has {len(queue.items)}" for queue in self._queues)

    def _raise_fault(self) -> None:
        if self.fault is not None:
            raise torch.AcceleratorError(f"virtual GPU error: {self.fault!r}") from self.fault

    def _host_point(self) -> None:
        if self._random.random() < self.laziness:
            return
        for _ in range(self._random.choice(RUN_LENGTHS)):
            if not self._run_one():
                return

    def _run_one(self) -> bool:
        """Run the head of the stream of highest priority; sometimes it loses its rank afterwards."""
        able = [queue for queue in self._queues if queue.can_run()]
        if not able:
            return False
        queue = max(able, key=lambda candidate: candidate.priority)
        self._run_head(queue)
        if self._random.random() < self._change_rate:
            queue.priority = min(other.priority for other in self._queues) - self._random.random()
        return True

    def _run_all(self, queue: Queue) -> None:
        while queue.can_run():
            self._run_head(queue)

    def _run_head(self, queue: Queue) -> None:
        item = queue.items.popleft()
        if isinstance(item, Mark):
            item.time_s = time.perf_counter()
            item.done = True
        elif isinstance(item, Kernel) and self.fault is None:
            try:
                with torch.inference_mode():
                    item.run()
            except Exception as error:
                if not self.deferring:
                    raise
                self.fault = error
