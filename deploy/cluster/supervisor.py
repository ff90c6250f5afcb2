"""Start children, pass on their log lines, restart dead children, and stop all children in order.

The supervisor is one loop on one thread.

    start all -> [ wait for output or a signal -> reap -> restart those due -> probe ] -> stop vital -> stop the others
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from deploy.cluster.child import Child, ChildSpec, describe_end, likely_cause
from deploy.cluster.restart_policy import RestartPolicy
from shared.core.exit_codes import EXIT_DRAINED
from shared.core.stop_signals import stop_signals
from shared.observe.log import Logger

TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class Readiness:
    """`probe` quickly returns whether the cluster is ready. `announce` is called once: when the cluster is ready."""

    probe: Callable[[], bool]
    announce: Callable[[], None]
    timeout_s: float


class Supervisor:
    """Start the children in the given order, and run them.

    Vital children have at least `stop_timeout_s` to stop; then the others have as long. Late children are killed.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        readiness: Readiness,
        log: Logger,
        *,
        max_restarts: int,
        stop_timeout_s: float,
        write_line: Callable[[str], None],
    ) -> None:
        self.children = [Child(spec, RestartPolicy(max_restarts), write_line) for spec in specs]
        self._readiness = readiness
        self._log = log
        self._stop_timeout_s = stop_timeout_s
        self._selector = selectors.DefaultSelector()
        self._stop_requests = 0
        self._failed = False
        self._ready = False

    def run(self) -> int:
        """Serve until a signal or a failure, and leave no child behind. Return the exit status.

        Failures: the cluster is not ready in time, a child stays down before the cluster is ready, all vital children
        stay down, or all other children stay down.
        """
        waker, wakes = socket.socketpair()
        waker.setblocking(False)
        wakes.setblocking(False)
        before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        old_fd = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self._selector.register(waker, selectors.EVENT_READ, None)
        try:
            self._serve()
            self._stop()
        finally:
            self._kill_rest()
            signal.set_wakeup_fd(old_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            waker.close()
            wakes.close()
        return 1 if self._failed else 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_requests += 1

    def _serve(self) -> None:
        deadline = time.monotonic() + self._readiness.timeout_s
        for child in self.children:
            self._start(child)
        while not self._stop_requests and not self._failed:
            self._wait(TICK_S)
            self._reap(time.monotonic())
            self._restart_due(time.monotonic())
            self._check_ready(deadline)

    def _start(self, child: Child) -> None:
        self._selector.register(child.start(), selectors.EVENT_READ, child)
        self._log.debug("started", process=child.spec.name, pid=child.pid)

    def _wait(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Child):
                if not key.data.pump():
                    self._selector.unregister(key.fd)
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.recv(256)

    def _reap(self, now: float) -> None:
        for child in self.children:
            status = self._reap_one(child)
            if status is not None:
                self._after_death(child, status, now)

    def _reap_one(self, child: Child) -> int | None:
        fd = child.fileno() if child.running else -1
        status = child.reap()
        if status is not None and fd in self._selector.get_map():
            self._selector.unregister(fd)
        return status

    def _after_death(self, child: Child, status: int, now: float) -> None:
        delay = child.policy.delay_after_death(now, status)
        how, likely = describe_end(status), likely_cause(status)
        if delay is not None and (self._ready or not child.spec.vital):
            child.restart_at = now + delay
            self._log.warning(f"{child.spec.name} {how}; it is started again", in_s=delay, **likely)
            return
        child.given_up = True
        if status == EXIT_DRAINED:
            self._log.info(f"{child.spec.name} was drained and stays down")
            return
        kind = [other for other in self.children if other.spec.vital is child.spec.vital]
        last = all(other.given_up for other in kind)
        self._failed = self._failed or not self._ready or last
        self._log.error(f"{child.spec.name} {how} and stays down" + ("; stopping" if self._failed else ""), **likely)

    @property
    def children_not_vital(self) -> list[Child]:
        return [child for child in self.children if not child.spec.vital]

    def _restart_due(self, now: float) -> None:
        for child in self.children:
            if child.restart_at is not None and child.restart_at <= now:
                self._start(child)

    def _check_ready(self, deadline: float) -> None:
        if self._ready or self._failed or self._stop_requests:
            return
        if self._readiness.probe():
            self._ready = True
            self._readiness.announce()
        elif time.monotonic() > deadline:
            self._failed = True
            limit_s = self._readiness.timeout_s
            self._log.error("not ready in time (a slow disk? see --start-timeout-s); stopping", timeout_s=limit_s)

    def _stop(self) -> None:
        """Stop vital children first: routers finish open requests while nodes still serve."""
        self._log.info("stopping; a second signal ends all processes at once")
        for group in ([c for c in self.children if c.spec.vital], self.children_not_vital):
            for child in group:
                child.send(signal.SIGTERM)
            self._wait_for_end(group)

    def _wait_for_end(self, group: list[Child]) -> None:
        deadline = time.monotonic() + max([self._stop_timeout_s, *(child.spec.stop_s for child in group)])
        while any(child.running for child in group) and time.monotonic() < deadline and self._stop_requests < 2:
            self._wait(TICK_S)
            for child in self.children:
                self._reap_one(child)

    def _kill_rest(self) -> None:
        late = [child for child in self.children if child.running]
        for child in late:
            self._log.warning(f"{child.spec.name} did not stop; killed", pid=child.pid)
            child.send(signal.SIGKILL)
        while any(child.running for child in late):
            self._wait(TICK_S)
            for child in late:
                self._reap_one(child)
