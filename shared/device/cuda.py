"""CUDA stream: fn runs at once on the calling thread, under a torch.cuda.Stream, and enqueues kernels.

Written with care and NOT yet run on a GPU: the tests of the other backends state what it must do.

An event fires in two moments: `fire()` inside the closure records a CUDA event (that is what other streams wait for,
on the device), and a watcher thread completes it on the host once the device got there. So `query()`, callbacks and
`notify` never lie about work that is merely enqueued. The watcher sleeps in cudaEventSynchronize, without the GIL.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch

from shared.core.errors import ConfigError
from shared.device.cpu import do_nothing
from shared.device.events import Event, Ticket
from shared.device.stream import Closure, StreamEpochs, make_work, run_work

R = TypeVar("R")
logger = logging.getLogger(__name__)


POOL_SIZE = 32  # streams of one priority that torch hands out, round robin


def draw_stream(device: torch.device, priority: int, taken: Collection[int]) -> torch.cuda.Stream:
    """One whose handle is not in `taken`: two streams with one handle are one stream, and nothing overlaps (H7)."""
    for _ in range(POOL_SIZE):
        stream = torch.cuda.Stream(device=device, priority=priority)
        if stream.cuda_stream not in taken:
            return stream
    raise ConfigError(f"torch has no stream on {device} that is not in use here already")


class CudaMarks:
    """Driver of one stream's events: CUDA marks in record order, and the thread that completes events after them."""

    def __init__(self, name: str, stream: torch.cuda.Stream, notify: Callable[[], None]) -> None:
        self._stream = stream
        self._notify = notify
        self._marks: dict[Event, torch.cuda.Event] = {}  # recorded and not yet complete
        self._pending: queue.SimpleQueue[tuple[Event, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"marks-{name}", daemon=True)
        self._thread.start()

    def poll(self, event: Event) -> None:
        """Nothing to do: the watcher completes events."""

    def block(self, event: Event, timeout_s: float | None) -> None:
        event.wait_flag(timeout_s)

    def defer(self, event: Event) -> bool:
        """Records where the stream is now; the watcher completes the event after it."""
        mark = torch.cuda.Event(blocking=True)
        mark.record(self._stream)
        self._marks[event] = mark
        self._pending.put((event, mark))
        return True

    def mark_of(self, event: Event) -> torch.cuda.Event | None:
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


class CudaStream:
    """`launch` returns when fn has enqueued its work. Tensors that cross streams stay alive through their lease.
    `taken`: handles of streams that this one must not be."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        notify: Callable[[], None] = do_nothing,
        priority: int = 0,
        taken: Collection[int] = (),
    ) -> None:
        self.name = name
        self.cuda_stream = draw_stream(device, priority, taken)
        self._marks = CudaMarks(name, self.cuda_stream, notify)
        self._epochs = StreamEpochs()
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
        with torch.cuda.stream(self.cuda_stream), torch.inference_mode():
            run_work(work, self._epochs)
        return work.ticket

    def wait(self, event: Event) -> None:
        if event.peek():
            return
        mark = event.driver.mark_of(event) if isinstance(event.driver, CudaMarks) else None
        if mark is not None:
            self.cuda_stream.wait_event(mark)
        else:  # an event of a host thread, or completed between the two lines
            event.synchronize()

    def reset(self) -> None:
        self._epochs.open_next()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.cuda_stream.synchronize()
            self._marks.stop()
