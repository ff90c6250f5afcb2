"""Runs a script in a process of its own, for tests of what may end or stop a whole process."""

from __future__ import annotations

import subprocess
import sys

from tests.support.machine.patience import HANG_GUARD_S


def printed(script: str, *args: str) -> str:
    """Return what the script printed. Raise AssertionError if it failed or did not end."""
    command = [sys.executable, "-c", script, *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S)
    except subprocess.TimeoutExpired:
        raise AssertionError("the process did not end") from None
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
