"""Ends a child process when its parent ends, even by kill -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
POLL_S = 1.0


def die_with_parent(parent_pid: int) -> None:
    """Call this function before anything else in the process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=watch_parent, args=(parent_pid,), daemon=True, name="orphan-guard").start()
    if os.getppid() != parent_pid:  # the parent ended before prctl
        os._exit(1)


def watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
