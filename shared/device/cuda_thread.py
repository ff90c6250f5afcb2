"""CUDA stream with a thread of its own: closures run there, one after the other, and may block. For transfers and
copies of the cold tier, which wait for peers, disks and digests: the loop's thread never waits with them.

    loop    launch(pull) . . . . . . . . . . . done.query()
    thread        wait(newest step)  pull, digests  synchronize  done
    device              |......step| copies  |
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

import torch

from shared.device.cpu import CpuStream, do_nothing
from shared.device.cuda import draw_stream, mark_of
from shared.device.events import Event, Ticket
from shared.device.gpu import Gpu
from shared.device.stream import Closure, run_to_end

R = TypeVar("R")
logger = logging.getLogger(__name__)


class ThreadedCudaStream(CpuStream):
    """`done` fires, and so does every event a closure fires, when the device has finished what came before. It drives
    the events that its closures are armed with (EventDriver)."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        gpu: Gpu,
        *,
        on_thread_start: Callable[[], None] = do_nothing,
        notify: Callable[[], None] = do_nothing,
        priority: int = 0,
        taken: Collection[int] = (),
    ) -> None:
        self._gpu = gpu
        self._device = device
        self.cuda_stream = draw_stream(gpu, device, priority, taken)
        super().__init__(name, on_thread_start=on_thread_start, notify=notify)

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        for event in fires:
            event.bind(self)
        label = label or f"{self.name}:{getattr(fn, '__name__', 'closure')}"
        ticket = super().launch(lambda: self._run_and_wait(fn), fires, label)
        ticket.done.bind(self)  # one of this thread's: the other streams' launches do not move to it
        return ticket

    def poll(self, event: Event) -> None:
        """Nothing to do: the worker completes events."""

    def block(self, event: Event, timeout_s: float | None) -> None:
        event.wait_flag(timeout_s)

    def defer(self, event: Event) -> bool:
        """An event fired inside a closure tells of work that is merely enqueued: waits for it here, on the worker. On
        another thread nothing was enqueued: the closure was skipped."""
        if threading.current_thread() is self._thread:
            try:
                self._sleep_until_done()
            except Exception as error:  # a sticky device fault: whoever waits must wake and see it
                logger.exception("device fault before event %s", event.name)
                event.error = event.error or error
        return False

    def _run_and_wait(self, fn: Closure[R]) -> R:
        # Of a closure that raised, too: what it enqueued may still write pages that the host would take back.
        try:
            return run_to_end(fn)
        finally:
            self._sleep_until_done()

    def _sleep_until_done(self) -> None:
        """A stream's own `synchronize` may spin."""
        mark = self._gpu.new_event(blocking=True)
        mark.record(self.cuda_stream)
        mark.synchronize()

    @contextlib.contextmanager
    def _surroundings(self) -> Generator[None, None, None]:
        gpu = self._gpu
        with gpu.use_device(self._device), gpu.use_stream(self.cuda_stream), gpu.closure_mode():
            yield

    def _block_on(self, event: Event) -> None:
        """The device waits where it can, else the worker does."""
        mark = mark_of(event)
        if mark is None:
            super()._block_on(event)
            return
        try:
            self.cuda_stream.wait_event(mark)
        except Exception:  # this thread must live on to settle all; what would run without its order is skipped
            logger.exception("device fault at a wait for event %s", event.name)
            self._epochs.fail(self.epoch)
