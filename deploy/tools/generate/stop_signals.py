"""Turn stop signals into a clean end by cancellation."""

from __future__ import annotations

import asyncio
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from shared.core.stop_signals import stop_signals


class StopSignals:
    """Inside the `with` block, a signal cancels the watched task. Without a watched task, a signal raises
    KeyboardInterrupt.

    Ignored signals stay ignored, as nohup and a shell's background jobs require.
    """

    def __init__(self) -> None:
        self.number = int(signal.SIGINT)
        self._before: dict[int, Any] = {}
        self._watched: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in stop_signals() if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch_current_task(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._watched = (asyncio.get_running_loop(), task)

    def unwatch(self) -> None:
        self._watched = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if self._watched is None:
            raise KeyboardInterrupt
        loop, task = self._watched
        loop.call_soon_threadsafe(task.cancel)
