"""One supervised process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from deploy.cluster.restart_policy import RestartPolicy
from shared.config.gpus import environment_with

READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A `vital` child is stopped before the others. If it dies before the cluster is ready, the cluster ends.

    `stop_s`: the seconds in which the child's settings let it stop. `gpus`: CUDA_VISIBLE_DEVICES for the child; "":
    unchanged.
    """

    name: str
    argv: tuple[str, ...]
    vital: bool = False
    stop_s: float = 0.0
    gpus: str = ""


class Child:
    """Own one process, and write its output in whole lines."""

    def __init__(self, spec: ChildSpec, policy: RestartPolicy, write_line: Callable[[str], None]) -> None:
        self.spec = spec
        self.policy = policy
        self.restart_at: float | None = None  # time.monotonic() of the planned restart; None without one
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
        """Start the process in a new session, which Ctrl-C does not reach. Return the descriptor of its output."""
        self.restart_at = None
        self._process = subprocess.Popen(
            self.spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment_with(self.spec.gpus) if self.spec.gpus else None,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        return self._process.stdout.fileno()

    def fileno(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def pump(self) -> bool:
        """Write the available output. Return False at the output's end."""
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
        """Write the line after the child's name. Our daemons' lines have the name as third word, and stay unchanged."""
        if line:
            named = line.split(maxsplit=3)[2:3] == [self.spec.name]
            self._write_line(line if named else f"{self.spec.name} | {line}")

    def reap(self) -> int | None:
        """Return an ended process's exit status, after draining its pipe; None while it runs. A status of -n means
        signal n."""
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
        """Return whether a read would not block. A silent grandchild may keep the pipe open after the child's end."""
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
