"""Log the compilation of kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared.device.cpu import do_nothing
from shared.observe.log import Logger

SAID_EVERY_S = 3.0
WORTH_SAYING_S = 1.0  # compile time before the first log line; reading compiled code from disk takes less


class KernelLog:
    """Any thread may call its methods."""

    def __init__(self, log: Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said_at = clock() + WORTH_SAYING_S - SAID_EVERY_S
        self._is_serving = False
        self.num_ready = 0
        self.seconds = 0.0  # total compile time
        self._lock = threading.Lock()

    def serving(self) -> None:
        """Record that requests may now wait for a kernel."""
        self._is_serving = True
        if self.num_ready:
            self._log.info("kernels are ready", kernels=self.num_ready, seconds=round(self.seconds, 2))

    def compiling(self, kernel: str) -> None:
        now = self._clock()
        if not self._is_serving and now >= self._said_at + SAID_EVERY_S:
            self._said_at = now
            self._log.info("compiling, once for this version and machine", kernel=kernel, done=self.num_ready)

    def made_ready(self, kernel: str, seconds: float) -> None:
        with self._lock:
            self.num_ready += 1
            self.seconds += seconds
        if self._is_serving:
            self._log.warning("a request waited for a kernel", kernel=kernel, seconds=round(seconds, 3))


def tell_of_kernels(news: KernelLog, device: str) -> Callable[[], None]:
    """Report compilations to `news`; return a function that ends the reports.

    Do nothing on a GPU's node, which doesn't import numba.
    """
    if device == "cuda":
        return do_nothing
    from shared.kernel.code.compile_watch import CompileWatch

    watch = CompileWatch(news)
    watch.start()
    return watch.stop
