"""Requests that were in a failed step and have not come through one since. Each runs alone until it does.

    a b c d fail in one step     all four are suspects and begin again; e and f were in other steps
    a | e f | b | e f | c ...    one suspect alone, then the others, in turns
    a comes through              prompt and one decode step: it steps with the others from now on
    c fails again                nobody else was in its step: the request is to blame, or the device is

A request runs again at most once for each failed step that it shared, and then brings a token or ends.
Knows nothing of pages, plans and errors.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.core.request import Request


class Suspects:
    """Owner of who is suspected. The scheduler's thread only."""

    def __init__(self) -> None:
        self._suspected: set[Request] = set()
        self._was_alone = False  # the last step was a suspect's

    def __len__(self) -> int:
        return len(self._suspected)

    def __contains__(self, req: Request) -> bool:
        return req in self._suspected

    def add(self, req: Request) -> None:
        self._suspected.add(req)

    def clear(self, req: Request) -> None:
        """It came through a step, or left. Everybody else is legal too."""
        self._suspected.discard(req)

    def choose(self, ready: Iterable[Request]) -> set[Request]:
        """Return who shares the next step: the oldest suspect alone, or all who are none, in turns."""
        ready = set(ready)
        others = ready - self._suspected
        alone = min(ready & self._suspected, key=lambda req: req.arrival, default=None)
        if alone is None or others and self._was_alone:
            self._was_alone = False
            return others
        self._was_alone = True
        return {alone}
