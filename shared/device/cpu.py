"""CPU stream: a worker thread that runs closures in launch order, in inference_mode.

The worker calls `notify` after each result, to wake the node's loop. A missing wait is noticed only by chance, so
tests of the order of work use the simulated backend.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shared.core.held_result import hold, release
from shared.device.events import Event, Ticket
from shared.device.gpu import Context
from shared.device.stream import Closure, StreamEpochs, Work, make_work, run_unsettled

R = TypeVar("R")
STOP_CHECK_S = 0.1
logger = logging.getLogger(__name__)


def do_nothing() -> None:
    """Default for callbacks."""


class CpuStream:
    """Owns the worker thread from __init__ to stop().

    The worker first calls `on_thread_start`: torch's thread counts, affinity and inference_mode are thread-local.
    """

    def __init__(
        self,
        name: str,
        *,
        on_thread_start: Callable[[], None] = do_nothing,
        notify: Callable[[], None] = do_nothing,
        computes: bool = False,
    ) -> None:
        """`computes`: whether results are kept back while more work waits (held_result.py).

        A closure of such a stream calls `release` before it waits for another stream."""
        self.name = name
        self._computes = computes
        self._on_thread_start = on_thread_start
        self._notify = notify
        self._epochs = StreamEpochs()
        self._items: queue.SimpleQueue[Work[Any] | Event | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # so that no work follows the None that ends the worker
        self._thread = threading.Thread(target=self._main, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        work = make_work(fn, fires, label, self.name, self._epochs.current)
        with self._lock:
            if not self._stopping.is_set():
                self._items.put(work)
                return work.ticket
        work.skip("the stream was stopped")
        return work.ticket

    def wait(self, event: Event) -> None:
        if not event.peek():
            self._items.put(event)

    def reset(self) -> None:
        self._epochs.open_next()

    def stop(self) -> None:
        self._begin_stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _begin_stop(self) -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._stopping.set()
                self._items.put(None)

    def _main(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                self._on_thread_start()
                stack.enter_context(self._surroundings())
            except Exception:
                logger.exception("stream %s: on_thread_start failed; all its work will be skipped", self.name)
                self._begin_stop()
            while (item := self._next()) is not None:
                if isinstance(item, Event):
                    release()
                    self._block_on(item)
                else:
                    self._run(item)
            release()

    def _next(self) -> Work[Any] | Event | None:
        if self._items.empty():
            release()
        return self._items.get()

    def _surroundings(self) -> Context:
        return torch.inference_mode()

    def _run(self, work: Work[Any]) -> None:
        if self._stopping.is_set():
            settle: Callable[[], None] = functools.partial(work.skip, "the stream was stopped")
        else:
            settle = run_unsettled(work, self._epochs)
        give = functools.partial(self._give, settle)
        if self._computes:
            hold(give)
        else:
            give()

    def _give(self, settle: Callable[[], None]) -> None:
        settle()
        self._notify()

    def _block_on(self, event: Event) -> None:
        while not event.peek() and not self._stopping.is_set():
            try:
                event.synchronize(STOP_CHECK_S)
            except TimeoutError:
                continue
