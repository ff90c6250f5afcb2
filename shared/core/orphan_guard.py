"""A child process that ends with its parent, however the parent ended: kill -9 included."""

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
    """Called first thing in the child. On Linux the kernel kills it; elsewhere a thread looks once a second."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=watch_parent, args=(parent_pid,), daemon=True, name="orphan-guard").start()
    if os.getppid() != parent_pid:  # it ended before the kernel knew
        os._exit(1)


def watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
