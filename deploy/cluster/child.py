"""One supervised process: its command, its pipe of log lines, its starts and ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from deploy.cluster.restart_policy import RestartPolicy

READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `vital`: without it nothing works, so giving it up ends the whole cluster."""

    name: str
    argv: tuple[str, ...]
    vital: bool = False


class Child:
    """Owned by the supervisor's loop. Output of the process comes as whole lines that carry its name."""

    def __init__(self, spec: ChildSpec, policy: RestartPolicy, write_line: Callable[[str], None]) -> None:
        self.spec = spec
        self.policy = policy
        self.restart_at: float | None = None  # set while it waits to be started again
        self.given_up = False
        self._process: subprocess.Popen[bytes] | None = None
        self._write_line = write_line
        self._partial = b""

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> int:
        """Returns the descriptor to read its output from. A session of its own: Ctrl-C reaches the supervisor only."""
        self.restart_at = None
        self._process = subprocess.Popen(
            self.spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        return self._process.stdout.fileno()

    def fileno(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def pump(self) -> bool:
        """Passes on what it wrote; False when there will be no more."""
        try:
            data = os.read(self.fileno(), READ_BYTES)
        except BlockingIOError:
            return True
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LONGEST_LINE or not data:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            self._emit(line.decode("utf-8", "replace").rstrip("\r"))
        return bool(data)

    def _emit(self, line: str) -> None:
        """Our own records name the process already (third word); a traceback or a library's cry does not."""
        if line:
            named = line.split(maxsplit=3)[2:3] == [self.spec.name]
            self._write_line(line if named else f"{self.spec.name} | {line}")

    def reap(self) -> int | None:
        """Exit status if it has ended (negative: by which signal), else None. Reads what is left in its pipe."""
        if self._process is None or self._process.poll() is None:
            return None
        status = self._process.returncode
        while self.pump():
            if not self._has_more():
                break
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return status

    def _has_more(self) -> bool:
        """Whether a read would give something now: a grandchild may hold the pipe open without writing."""
        return bool(select.select([self.fileno()], [], [], 0)[0])

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def describe_end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
