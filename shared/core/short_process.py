"""Run a short process whose answer is its output, without hanging on it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

REAP_S = 2.0  # a killed process ends at once, unless a driver holds it in the kernel: then it never ends


def run_short(command: Sequence[str], timeout_s: float, text: str = "") -> subprocess.CompletedProcess[str]:
    """Return exit status and output of a process that reads `text`. Raise subprocess.TimeoutExpired, and OSError.

    `subprocess.run` waits without a limit for a process that it has killed.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        out, err = process.communicate(text, timeout=timeout_s)
    except BaseException:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(OSError):  # what was not sent
                assert stream is not None
                stream.close()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
