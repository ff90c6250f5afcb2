"""Reports each kernel that numba compiles or reads from disk, because nodes and requests wait meanwhile.

Meanwhile numba holds its compiler lock.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

import numba
from numba.core import event

LOCK, PASS = "numba:compiler_lock", "numba:run_pass"
NUMBA, OURS = str(Path(numba.__file__).parent), str(Path(__file__).parents[3])
STAMPS = re.compile(r"(_[0-9a-f]{8}){2}$")  # the suffix that jit.py adds to a kernel's name


class CompileNews(Protocol):
    """The methods are called on the thread that asked for the code."""

    def compiling(self, kernel: str) -> None:
        """Report that a kernel is being compiled, many times per kernel."""

    def made_ready(self, kernel: str, seconds: float) -> None:
        """Report a kernel that was compiled or read from disk.

        A kernel read from disk is named by the line of our code that needed it. `seconds` include the wait for other
        compilations."""


class CompileWatch(event.Listener):
    def __init__(self, news: CompileNews) -> None:
        self._news = news
        self._here = threading.local()

    def start(self) -> None:
        for kind in (LOCK, PASS):
            event.register(kind, self)

    def stop(self) -> None:
        for kind in (PASS, LOCK):
            event.unregister(kind, self)

    def on_start(self, event: event.Event) -> None:
        here = self._here
        if event.kind == LOCK:
            here.depth = getattr(here, "depth", 0) + 1
            if here.depth == 1:  # callees are compiled inside their caller's compilation
                here.kernel, here.begun = "", time.monotonic()
        elif getattr(here, "depth", 0):
            here.kernel = here.kernel or name_of(event.data["qualname"])
            self._news.compiling(here.kernel)

    def on_end(self, event: event.Event) -> None:
        here = self._here
        # ignore ends of compiler passes, and of locks taken before `start`
        if event.kind != LOCK or not getattr(here, "depth", 0):
            return
        here.depth -= 1
        if here.depth == 0:
            self._news.made_ready(here.kernel or asked_from(), time.monotonic() - here.begun)


def name_of(qualname: str) -> str:
    return STAMPS.sub("", qualname.rpartition(".")[2])


def asked_from() -> str:
    """Return file:line of the innermost frame in our code."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_ours(path: str) -> bool:
    return path.startswith(OURS) and not path.startswith((NUMBA, __file__))
