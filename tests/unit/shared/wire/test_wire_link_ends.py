"""What ends in which order when a link is closed."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shared.wire.wakeup import Wakeup
from shared.wire.zeromq import link


class Ends:
    """Stands in for what has an end, and says when it comes."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def close(self) -> None:
        self._said.append(self._name)

    term = close


def test_a_context_ends_after_its_sockets() -> None:
    """The end of a context waits for sockets that are open, for ever."""
    said: list[str] = []
    parts = [Ends(name, said) for name in ("context", "authenticator", "router")]
    link.close_router(*parts)  # type: ignore[arg-type]
    assert said == ["router", "authenticator", "context"]


def test_a_wakeup_is_set_and_closed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that was read, closed and given out again is another file's when it is written. Frames may be gone in
    the middle of a `set`, on the same thread, and set it again."""
    wakeup, calls = Wakeup(), []
    with ThreadPoolExecutor(1) as other:

        def locked(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                calls.append(real)
                if len(calls) == 1:
                    wakeup.set()
                assert not other.submit(wakeup._lock.acquire, blocking=False).result(), "another thread gets in"
                return real(*args)

            return call

        monkeypatch.setattr(os, "write", locked(os.write))
        monkeypatch.setattr(os, "close", locked(os.close))
        wakeup.set()
        wakeup.close()
        monkeypatch.undo()
    assert len(calls) == 4


def test_who_wakes_a_closed_link_writes_into_nobody_s_file() -> None:
    """Frames that are gone at last tell so late, and the numbers of closed descriptors are given out again."""
    wakeup = Wakeup()
    wakeup.close()
    pipes = [os.pipe() for _ in range(2)]
    for fd in (fd for pair in pipes for fd in pair):
        os.set_blocking(fd, False)
    wakeup.set()
    for reader, writer in pipes:
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        os.close(reader), os.close(writer)
