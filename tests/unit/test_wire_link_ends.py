"""What ends in which order when a link is closed."""

from __future__ import annotations

import os

import pytest

from shared.wire import link
from shared.wire.wakeup import Wakeup


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
