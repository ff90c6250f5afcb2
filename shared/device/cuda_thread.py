"""CUDA stream with a worker thread, where closures run in order and may block.

Transfers and cold-tier copies use this stream, because they wait for peers, disks and digests.

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
    """Drives its closures' and tickets' events (EventDriver): they complete after all earlier device work."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        gpu: Gpu,
        *,
        on_thread_start: Callable[[], None] = do_nothing,
        notify: Callable[[], None] = do_nothing,
        taken: Collection[int] = (),
    ) -> None:
        self._gpu = gpu
        self._device = device
        self.cuda_stream = draw_stream(gpu, device, taken)
        super().__init__(name, on_thread_start=on_thread_start, notify=notify)

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        for event in fires:
            event.bind(self)
        label = label or f"{self.name}:{getattr(fn, '__name__', 'closure')}"
        ticket = super().launch(lambda: self._run_and_wait(fn), fires, label)
        # With this driver, a CudaStream blocks its thread to wait for `done`. Without a driver, it would hold back its
        # launches, and this worker would launch them.
        ticket.done.bind(self)
        return ticket

    def poll(self, event: Event) -> None:
        """Do nothing: the worker completes events."""

    def block(self, event: Event, timeout_s: float | None) -> None:
        event.wait_flag(timeout_s)

    def defer(self, event: Event) -> bool:
        """On the worker, wait until the device has done the enqueued work; `fire` then completes the event.

        Another thread calls this only for a skipped closure, which has enqueued nothing.
        """
        if threading.current_thread() is self._thread:
            try:
                self._sleep_until_done()
            except Exception as error:  # a sticky device fault: waiters must wake and see it
                logger.exception("device fault before event %s", event.name)
                event.error = event.error or error
        return False

    def _run_and_wait(self, fn: Closure[R]) -> R:
        # wait even after an exception: enqueued work may still write pages that the host would reuse
        try:
            return run_to_end(fn)
        finally:
            self._sleep_until_done()

    def _sleep_until_done(self) -> None:
        """Sleep until the device has done all enqueued work. A stream's `synchronize` might spin."""
        mark = self._gpu.new_event(blocking=True)
        mark.record(self.cuda_stream)
        mark.synchronize()

    @contextlib.contextmanager
    def _surroundings(self) -> Generator[None, None, None]:
        gpu = self._gpu
        with gpu.use_device(self._device), gpu.use_stream(self.cuda_stream), gpu.closure_mode():
            yield

    def _block_on(self, event: Event) -> None:
        mark = mark_of(event)
        if mark is None:
            super()._block_on(event)
            return
        try:
            self.cuda_stream.wait_event(mark)
        except Exception:  # the worker must go on and settle all work; later work is skipped
            logger.exception("device fault at a wait for event %s", event.name)
            self._epochs.fail(self._epochs.current)
