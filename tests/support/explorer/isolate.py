"""Runs one case in a child process: a mutant may make a kernel read beyond its arrays, which ends a process."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

LIMIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """`oracle` is '' when nothing was found; a child that died is a crash."""

    oracle: str
    message: str


def in_child(fn: Callable[[], tuple[str, str]], limit_s: float = LIMIT_S) -> Outcome:
    """Run fn, which returns (oracle, message), in a forked child. The parent must have no other threads."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _answer(fn, writer)
    os.close(writer)
    text = _read(reader, time.monotonic() + limit_s)
    if text is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if text is None:
        return Outcome("hang", f"no end within {limit_s:.0f} s")
    if os.WIFSIGNALED(status) or not text:
        return Outcome("crash", f"killed by signal {os.WTERMSIG(status)}")
    oracle, message = json.loads(text)
    return Outcome(oracle, message)


def _answer(fn: Callable[[], tuple[str, str]], writer: int) -> None:
    """Never returns: the child must not run its parent's way out."""
    try:
        answer = fn()
    except BaseException as error:
        answer = ("crash", repr(error))
    os.write(writer, json.dumps(answer).encode()[:60_000])
    os._exit(0)


def _read(reader: int, deadline: float) -> bytes | None:
    """Everything the child writes; None when time is up."""
    parts = []
    try:
        while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(reader, 65_536)
            if not part:
                return b"".join(parts)
            parts.append(part)
        return None
    finally:
        os.close(reader)
