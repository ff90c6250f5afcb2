"""Isolate requests that shared a failed step. Each runs alone until one of its steps succeeds.

    a b c d fail in one step     all four are suspects and begin again; e and f were in other steps
    a | e f | b | e f | c ...    one suspect alone, then the others, in turns
    a runs alone and succeeds    after its prompt and one decode step, a rejoins the others
    c runs alone and fails       c or the device is to blame

After each shared failure, a request runs again at most once. This run emits a token or ends the request.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.core.request import Request


class Suspects:
    """Scheduler thread only."""

    def __init__(self) -> None:
        self._suspected: set[Request] = set()
        self._was_alone = False  # whether the last step ran a suspect

    def __len__(self) -> int:
        return len(self._suspected)

    def __contains__(self, req: Request) -> bool:
        return req in self._suspected

    def add(self, req: Request) -> None:
        self._suspected.add(req)

    def clear(self, req: Request) -> None:
        """Clear a request that has succeeded or left. The request need not be a suspect."""
        self._suspected.discard(req)

    def choose(self, ready: Iterable[Request]) -> set[Request]:
        """Alternate: return only the oldest suspect, then all requests that are not suspects."""
        ready = set(ready)
        others = ready - self._suspected
        alone = min(ready & self._suspected, key=lambda req: req.arrival, default=None)
        if alone is None or others and self._was_alone:
            self._was_alone = False
            return others
        self._was_alone = True
        return {alone}
