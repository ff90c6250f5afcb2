"""What ends in which order when a link is closed."""

from __future__ import annotations

from shared.wire import link


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
