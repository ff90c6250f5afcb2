"""Find stop strings in the growing text of one choice."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back only text that may become a stop string.

    The text ends at the stop string that is complete first. If several stop strings end there, the longest is used. So
    the result does not depend on how the text is cut into pieces.

        fed:   ....visible....|held      held = longest end of the text that begins a stop string
    """

    __slots__ = ("_held", "_keeps", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        """`keeps`: whether the matched stop string is shown."""
        self._keeps = keeps
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Return the text that may be shown now; "" after a match."""
        if self.matched is not None or not piece:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        self._held = ""
        found = self._find(text)
        if found is not None:
            start, self.matched = found
            return text[: start + len(self.matched) * self._keeps]
        keep = self._possible_prefix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return (start, stop string) of the first complete match."""
        best: tuple[int, int, str] | None = None  # (end, start, stop)
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_prefix(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
