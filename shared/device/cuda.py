"""CUDA stream: `launch` runs a closure on the calling thread, and the closure enqueues kernels on a GPU stream.

Tests use a virtual GPU, which delays and reorders work as far as waits allow.

An event fires in two steps. `fire()` inside the closure records a mark, for which other streams wait on the device.
Once the device reaches the mark, a watcher thread completes the event on the host. So `query()`, callbacks and `notify`
never report work that is only enqueued. The watcher sleeps in `mark.synchronize`, without the GIL.
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


POOL_SIZE = 32  # number of torch's streams, handed out round robin


def draw_stream(gpu: Gpu, device: torch.device, taken: Collection[int]) -> GpuStream:
    """Return a stream whose handle is not in `taken`. Streams with equal handles never overlap their work (H7)."""
    for _ in range(POOL_SIZE):
        stream = gpu.new_stream(device)
        if stream.cuda_stream not in taken:
            return stream
    raise ConfigError(f"torch has no stream on {device} that is not in use here already")


class CudaMarks:
    """Owns a stream's marks in record order, and the watcher thread."""

    def __init__(self, name: str, gpu: Gpu, stream: GpuStream, notify: Callable[[], None]) -> None:
        self._gpu = gpu
        self._stream = stream
        self._notify = notify
        self._marks: dict[Event, GpuEvent] = {}  # recorded marks of incomplete events
        self._waiters: dict[Event, list[Callable[[], None]]] = {}  # functions to call once an event has fired
        self._pending: queue.SimpleQueue[tuple[Event, GpuEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"marks-{name}", daemon=True)
        self._thread.start()

    def poll(self, event: Event) -> None:
        """Do nothing: the watcher completes events."""

    def block(self, event: Event, timeout_s: float | None) -> None:
        event.wait_flag(timeout_s)

    def defer(self, event: Event) -> bool:
        """Record a mark. After a device fault, complete the event immediately, with the error."""
        mark = self._gpu.new_event(blocking=True)
        try:
            mark.record(self._stream)
        except Exception as error:
            logger.exception("device fault at event %s", event.name)
            event.error = event.error or error
            return False
        self._marks[event] = mark
        self._go_on_behind(event)  # before `put`, after which the watcher thread may complete the event
        self._pending.put((event, mark))
        return True

    def when_fired(self, event: Event, go_on: Callable[[], None]) -> None:
        """Call `go_on` on the firing thread, once the unfired event has a mark.

        After a device fault, call it once the event is complete."""
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
            except Exception as error:  # a sticky device fault: waiters must wake and see it
                logger.exception("device fault before event %s", event.name)
                event.error = event.error or error
            event.complete()
            self._marks.pop(event, None)
            self._notify()


def mark_of(event: Event) -> GpuEvent | None:
    """Return the mark of a CudaStream's fired, incomplete event, else None."""
    return event.driver.mark_of(event) if isinstance(event.driver, CudaMarks) else None


class CudaStream:
    """A stream of the GPU. `launch` returns when fn has enqueued its work.

    `taken`: handles that this stream must not reuse. Leases keep tensors alive while other streams use them.

    A device can wait only for enqueued work. It can't wait for a host event, or for an event whose launch is still
    held back. A stream that waits for such an event holds back its later launches. The thread that fires the event
    launches them. So a single thread must do all launches and fire all such events.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        gpu: Gpu,
        *,
        notify: Callable[[], None] = do_nothing,
        taken: Collection[int] = (),
    ) -> None:
        self.name = name
        self.cuda_stream = draw_stream(gpu, device, taken)
        self._gpu = gpu
        self._marks = CudaMarks(name, gpu, self.cuda_stream, notify)
        self._epochs = StreamEpochs()
        self._held: deque[Work[Any] | Event] = deque()
        self._stopped = False

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        work = make_work(fn, fires, label, self.name, self._epochs.current)
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
        except Exception as error:  # the device refused `use_stream`; closures' errors never get here
            self._epochs.fail(work.epoch)
            work.settle(None, error)

    def wait(self, event: Event) -> None:
        """Order later launches after the event: the device waits, or the stream holds back these launches.

        If the event is of a threaded stream, block the calling thread.
        """
        if self._held:
            self._held.append(event)
        elif not self._is_behind(event):
            self._hold(event)

    def _is_behind(self, event: Event) -> bool:
        """Order later launches after the event. Return False if the event has not fired."""
        if event.peek():
            return True
        mark = mark_of(event)
        if mark is not None:
            try:
                self.cuda_stream.wait_event(mark)
            except Exception:  # later work would not be ordered, so it is skipped
                logger.exception("device fault at a wait for event %s", event.name)
                self._epochs.fail(self._epochs.current)
            return True
        if event.driver is not None and not isinstance(event.driver, CudaMarks):
            event.synchronize()
        return event.peek()  # the event may have completed meanwhile

    def _hold(self, event: Event) -> None:
        self._held.appendleft(event)
        if isinstance(event.driver, CudaMarks):
            event.driver.when_fired(event, self._go_on)
        else:
            event.add_callback(lambda _: self._go_on())

    def _go_on(self) -> None:
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
            except Exception:  # the watcher and the other streams must still end
                logger.exception("device fault at the end of stream %s", self.name)
            self._marks.stop()
