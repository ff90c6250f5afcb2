"""CUDA stream: fn runs at once on the calling thread, under a stream of the GPU, and enqueues kernels.

NOT yet run on a GPU. The tests of all backends run it on a virtual one, whose work is late and out of order as far as
the waits allow.

An event fires in two moments: `fire()` inside the closure records a mark on the device (that is what other streams wait
for, there), and a watcher thread completes the event on the host once the device got there. So `query()`, callbacks and
`notify` never lie about work that is merely enqueued. The watcher sleeps in the mark's `synchronize`, without the GIL.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

from shared.core.errors import ConfigError
from shared.device.cpu import do_nothing
from shared.device.events import Event, Ticket
from shared.device.gpu import Gpu, GpuEvent, GpuStream
from shared.device.stream import Closure, StreamEpochs, Work, make_work, run_work

R = TypeVar("R")
logger = logging.getLogger(__name__)


POOL_SIZE = 32  # streams of one priority that torch hands out, round robin


def draw_stream(gpu: Gpu, device: torch.device, priority: int, taken: Collection[int]) -> GpuStream:
    """One whose handle is not in `taken`: two streams with one handle are one stream, and nothing overlaps (H7)."""
    for _ in range(POOL_SIZE):
        stream = gpu.new_stream(device, priority)
        if stream.cuda_stream not in taken:
            return stream
    raise ConfigError(f"torch has no stream on {device} that is not in use here already")


class CudaMarks:
    """Driver of one stream's events: marks in record order, and the thread that completes events after them."""

    def __init__(self, name: str, gpu: Gpu, stream: GpuStream, notify: Callable[[], None]) -> None:
        self._gpu = gpu
        self._stream = stream
        self._notify = notify
        self._marks: dict[Event, GpuEvent] = {}  # recorded and not yet complete
        self._waiters: dict[Event, list[Callable[[], None]]] = {}  # who goes on when an event has fired
        self._pending: queue.SimpleQueue[tuple[Event, GpuEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"marks-{name}", daemon=True)
        self._thread.start()

    def poll(self, event: Event) -> None:
        """Nothing to do: the watcher completes events."""

    def block(self, event: Event, timeout_s: float | None) -> None:
        event.wait_flag(timeout_s)

    def defer(self, event: Event) -> bool:
        """Records where the stream is now; the watcher completes the event after it. After a device fault nothing can
        be recorded: the event is complete at once, and says why."""
        mark = self._gpu.new_event(blocking=True)
        try:
            mark.record(self._stream)
        except Exception as error:
            logger.exception("device fault at event %s", event.name)
            event.error = event.error or error
            return False
        self._marks[event] = mark
        self._go_on_behind(event)  # here, before the watcher may complete the event on its own thread
        self._pending.put((event, mark))
        return True

    def when_fired(self, event: Event, go_on: Callable[[], None]) -> None:
        """Call `go_on` as soon as the event, which has not fired yet, has a mark; after a device fault, when it is
        complete without one. Both happen on the thread that fires it."""
        if event not in self._waiters:
            event.add_callback(self._go_on_behind)
        self._waiters.setdefault(event, []).append(go_on)

    def _go_on_behind(self, event: Event) -> None:
        for go_on in self._waiters.pop(event, ()):
            go_on()

    def mark_of(self, event: Event) -> GpuEvent | None:
        return self._marks.get(event)

    def stop(self) -> None:
        self._pending.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while (item := self._pending.get()) is not None:
            event, mark = item
            try:
                mark.synchronize()
            except Exception as error:  # a sticky device fault: whoever waits must wake and see it
                logger.exception("device fault before event %s", event.name)
                event.error = event.error or error
            event.complete()
            self._marks.pop(event, None)
            self._notify()


def mark_of(event: Event) -> GpuEvent | None:
    """What the device can wait for. None: the event has not fired, is complete, or is none of a CudaStream."""
    return event.driver.mark_of(event) if isinstance(event.driver, CudaMarks) else None


class CudaStream:
    """`launch` returns when fn has enqueued its work. Tensors that cross streams stay alive through their lease.
    `taken`: handles of streams that this one must not be.

    A device can't wait for what is not in one of its queues yet: an event of the host, or one of a stream that waits
    for such an event itself. The stream holds what is launched behind such an event, in order, until it fires. The
    thread that fires it then launches what was held; it must be the thread that launches everything else.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        gpu: Gpu,
        *,
        notify: Callable[[], None] = do_nothing,
        priority: int = 0,
        taken: Collection[int] = (),
    ) -> None:
        self.name = name
        self.cuda_stream = draw_stream(gpu, device, priority, taken)
        self._gpu = gpu
        self._marks = CudaMarks(name, gpu, self.cuda_stream, notify)
        self._epochs = StreamEpochs()
        self._held: deque[Work[Any] | Event] = deque()
        self._stopped = False

    @property
    def epoch(self) -> int:
        return self._epochs.current

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        work = make_work(fn, fires, label, self.name, self.epoch)
        if self._stopped:
            work.skip("the stream was stopped")
            return work.ticket
        for event in (*work.fires, work.ticket.done):
            event.bind(self._marks)
        if self._held:
            self._held.append(work)
        else:
            self._run(work)
        return work.ticket

    def _run(self, work: Work[Any]) -> None:
        try:
            with self._gpu.use_stream(self.cuda_stream), self._gpu.closure_mode():
                run_work(work, self._epochs)
        except Exception as error:  # closures' errors are settled: the device can't even take the stream
            self._epochs.fail(work.epoch)
            work.settle(None, error)

    def wait(self, event: Event) -> None:
        """The device waits, or launches are held; for an event of another thread's stream the calling thread blocks."""
        if self._held:
            self._held.append(event)
        elif not self._is_behind(event):
            self._hold(event)

    def _is_behind(self, event: Event) -> bool:
        """Order what is launched from now on behind the event. False: it has not fired."""
        if event.peek():
            return True
        mark = mark_of(event)
        if mark is not None:
            try:
                self.cuda_stream.wait_event(mark)
            except Exception:  # what would run without its order is skipped
                logger.exception("device fault at a wait for event %s", event.name)
                self._epochs.fail(self.epoch)
            return True
        if event.driver is not None and not isinstance(event.driver, CudaMarks):
            event.synchronize()
        return event.peek()  # it may have completed since

    def _hold(self, event: Event) -> None:
        """Until the event fires."""
        self._held.appendleft(event)
        if isinstance(event.driver, CudaMarks):
            event.driver.when_fired(event, self._go_on)
        else:
            event.add_callback(lambda _: self._go_on())

    def _go_on(self) -> None:
        """Launch what was held, up to the next event that has not fired."""
        while self._held:
            head = self._held.popleft()
            if isinstance(head, Work):
                self._run(head)
            elif not self._is_behind(head):
                self._hold(head)
                return

    def reset(self) -> None:
        self._epochs.open_next()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            held, self._held = self._held, deque()
            for item in held:
                if isinstance(item, Work):
                    item.skip("the stream was stopped")
            try:
                self.cuda_stream.synchronize()
            except Exception:  # the thread goes all the same, and the other streams are stopped
                logger.exception("device fault at the end of stream %s", self.name)
            self._marks.stop()
