"""Network namespaces without names: a thread enters one, and what it opens or starts is there. Knows no addresses.

This process alone holds them, by descriptors. So the kernel takes them away when it ends, however it ends, with all
that is in them; nothing has to be cleaned up, and two runs can't meet.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

CLONE_NEWNET = 0x40000000
WORKERS = 4  # what happens in one namespace at a time: its load, a look at its router, a process that is started
WHERE_TOOLS_ARE = (*os.environ.get("PATH", "").split(os.pathsep), "/usr/sbin", "/sbin")  # root's, by `su` not on PATH
P = ParamSpec("P")
T = TypeVar("T")


def ip_tool() -> str | None:
    """Return the path of iproute2's `ip`."""
    return shutil.which("ip", path=os.pathsep.join(WHERE_TOOLS_ARE))


def ip(line: str) -> None:
    """Run `ip` in this thread's namespace. Fail with its own words where it refuses."""
    tool = ip_tool()
    assert tool is not None, "iproute2 is missing"
    done = subprocess.run([tool, *line.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {line}: {done.stderr.strip()}"


def enter(descriptor: int) -> None:
    """Move this thread, and only this one, into a namespace."""
    call_libc("setns", descriptor, CLONE_NEWNET)


def new_namespace() -> int:
    """Return a descriptor of a new namespace. Raise OSError where this user can't make one."""
    with ThreadPoolExecutor(1) as thread:  # a thread of its own, for it can't go back
        return thread.submit(_unshared).result()


def _unshared() -> int:
    call_libc("unshare", CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def call_libc(name: str, *numbers: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*numbers):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


class Namespace:
    """One network stack. `do` waits for what it runs there, `begin` does not."""

    def __init__(self) -> None:
        self._descriptor = new_namespace()
        self._threads = ThreadPoolExecutor(WORKERS, initializer=enter, initargs=(self._descriptor,))
        self._all_here = threading.Barrier(WORKERS)
        for future in [self._threads.submit(self._all_here.wait) for _ in range(WORKERS)]:
            future.result()  # a process ends with the thread that started it: none of them may begin or end later

    @property
    def path(self) -> str:
        """How `ip` is told of it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.begin(work, *args, **kwargs).result()

    def begin(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._threads.submit(work, *args, **kwargs)

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)
