"""Run a short process whose answer is its output, without hanging on it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

REAP_S = 2.0  # a killed process ends at once, unless a driver holds it in the kernel: then it never ends


class NoEnd(subprocess.TimeoutExpired):
    """Its words follow the process's name."""

    def __init__(self, command: Sequence[str], timeout_s: float, *, is_held: bool) -> None:
        """`is_held`: it did not end when it was killed either."""
        super().__init__(command, timeout_s)
        self.is_held = is_held

    def __str__(self) -> str:
        held = " and can't be killed: a driver holds it in the kernel (state D), often until a reboot"
        return f"did not end in {self.timeout:g} s{held if self.is_held else ''}"


def run_short(command: Sequence[str], timeout_s: float, text: str = "") -> subprocess.CompletedProcess[str]:
    """Return exit status and output of a process that reads `text`. Raise NoEnd, and OSError.

    `subprocess.run` waits without a limit for a process that it has killed.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        out, err = process.communicate(text, timeout=timeout_s)
    except BaseException as error:
        process.kill()
        is_held = False
        try:
            process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            is_held = True
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(OSError):  # what was not sent
                assert stream is not None
                stream.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise NoEnd(command, timeout_s, is_held=is_held) from None
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
