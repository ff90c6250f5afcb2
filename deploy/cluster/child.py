"""One supervised process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from deploy.cluster.restart_policy import RestartPolicy
from shared.config.machine.gpus import environment_with
from shared.observe.log import JSON, foreign_line

READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 16
LONGEST_HEAD = 256  # characters of a log line up to its message
LIKELY = {
    -signal.SIGKILL: "the system ended it because memory ran out, unless somebody sent the signal",
    -signal.SIGBUS: "a mapped file, such as the model's, was cut off",
}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A `vital` child is stopped before the others. If it dies before the cluster is ready, the cluster ends.

    `stop_s`: the seconds in which the child's settings let it stop. `gpus`: CUDA_VISIBLE_DEVICES for the child; "":
    unchanged. `log_form`: of the log that the child writes, and shares with others.
    """

    name: str
    argv: tuple[str, ...]
    vital: bool = False
    stop_s: float = 0.0
    gpus: str = ""
    log_form: str = "text"


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
        """Write the line with the child's name. Lines of our daemons' logs have it already, and stay unchanged."""
        if line:
            spec = self.spec
            self._write_line(line if is_own(line, spec) else foreign_line(spec.log_form, spec.name, line))

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


def is_own(line: str, spec: ChildSpec) -> bool:
    """Return whether the child's log wrote the line: not a library, or Python at a crash."""
    if spec.log_form == JSON:
        return f',"part":"{spec.name}' in line[:LONGEST_HEAD]  # a rank's name begins with its node's
    return line.split(maxsplit=3)[2:3] == [spec.name]


def describe_end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def likely_cause(status: int) -> dict[str, object]:
    """Return a log line's field for an end whose status says too little."""
    return {"likely": LIKELY[status]} if status in LIKELY else {}
