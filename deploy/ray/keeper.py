"""Start, watch and stop one daemon: an actor's work, without Ray.

One thread, which lives as long as this process, forks the daemon. On Linux the kernel ends the daemon with that
*thread* (shared.core.orphan_guard), so a killed actor leaves no daemon. If the thread fails, it ends this process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from deploy.cluster.child import Child, ChildSpec, describe_end
from deploy.cluster.ready import write_line
from deploy.cluster.restart_policy import RestartPolicy
from deploy.ray.report import DRAINED, FAILED, IDLE, RUNNING, STOPPED
from shared.core.exit_codes import EXIT_CONFIG, EXIT_DRAINED

TICK_S = 0.1
KEPT_LINES = 12


class Keeper:
    """`start` and `stop` do not wait; `state` shows the progress.

    `on_death` is called with the exit status, but not after `stop`, a drain or a wrong configuration.
    """

    def __init__(
        self, write_line: Callable[[str], None], on_death: Callable[[int], None], stop_timeout_s: float
    ) -> None:
        self.state = IDLE
        self.pid = 0
        self._write_line = write_line
        self._on_death = on_death
        self._stop_timeout_s = stop_timeout_s
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._lock = threading.Lock()
        self._next: ChildSpec | None = None
        self._stopping = False
        self._kill_at: float | None = None
        threading.Thread(target=self._run_child, name="keeper", daemon=True).start()

    @property
    def words(self) -> str:
        return "\n".join(self._lines)

    def start(self, spec: ChildSpec) -> None:
        """Start a daemon, unless one runs, was drained, or had a wrong configuration."""
        with self._lock:
            if self.state in (IDLE, STOPPED) and self._next is None:
                self._next, self._stopping = spec, False

    def stop(self) -> None:
        with self._lock:
            self._next = None
            self._stopping = self.state == RUNNING
            if self.state == IDLE:
                self.state = STOPPED

    # ---- the thread

    def _run_child(self) -> None:
        try:
            self._serve()
        except BaseException:
            with contextlib.suppress(Exception):
                write_line(traceback.format_exc())
            os._exit(1)

    def _serve(self) -> None:
        while True:
            spec = self._take_next()
            if spec is None:
                time.sleep(TICK_S)
            else:
                self._live(spec)

    def _take_next(self) -> ChildSpec | None:
        with self._lock:
            spec, self._next = self._next, None
            if spec is not None:
                self.state = RUNNING
            return spec

    def _live(self, spec: ChildSpec) -> None:
        child = Child(spec, RestartPolicy(0), self._line)
        self._kill_at = None
        self._lines.clear()
        child.start()
        self.pid = child.pid or 0
        status = child.reap()
        while status is None:
            self._wait(child)
            self._end_if_asked(child)
            status = child.reap()
        self._child_ended(status)

    def _wait(self, child: Child) -> None:
        ready = select.select([child.fileno()], [], [], TICK_S)[0]
        if ready and not child.pump():
            time.sleep(TICK_S)  # the daemon has closed its output, so it is probably about to end

    def _line(self, line: str) -> None:
        self._lines.append(line)
        self._write_line(line)

    def _end_if_asked(self, child: Child) -> None:
        with self._lock:
            stopping = self._stopping
        if not stopping:
            return
        now = time.monotonic()
        if self._kill_at is None:
            self._kill_at = now + self._stop_timeout_s
            child.send(signal.SIGTERM)
        elif now > self._kill_at:
            child.send(signal.SIGKILL)

    def _child_ended(self, status: int) -> None:
        self._write_line(f"the daemon {describe_end(status)}")
        with self._lock:
            asked, self._stopping, self.pid = self._stopping, False, 0
            kept = {EXIT_DRAINED: DRAINED, EXIT_CONFIG: FAILED}.get(status, STOPPED)
            self.state = STOPPED if asked else kept
        if not asked and self.state == STOPPED:
            self._on_death(status)
