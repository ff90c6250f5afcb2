"""Follow the list of routers while a node runs.

Each source has a thread, so a silent name server delays neither the loop nor other sources. If a source can't be read,
its former list stays, and the reason is logged once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from shared.core.errors import ConfigError
from shared.device.cpu import do_nothing
from shared.node.routers.sources import RouterSource

logger = logging.getLogger(__name__)


class RouterWatch:
    """`fixed`: the flags' endpoints. The threads call `wake` when the list may have changed."""

    def __init__(
        self, fixed: Sequence[str] = (), sources: Sequence[RouterSource] = (), wake: Callable[[], None] = do_nothing
    ) -> None:
        self._fixed = tuple(fixed)
        self._sources = sources
        self._wake = wake
        self._found: dict[str, tuple[str, ...]] = {}  # source -> its endpoints
        self._complaints: dict[str, str] = {}
        self._taken = self._fixed
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(source,), name="routers", daemon=True) for source in sources
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads, without waiting for look-ups."""
        self._stop.set()

    def take_list(self) -> tuple[str, ...] | None:
        """Return the whole list if it changed since the last call. Loop thread only."""
        found = [self._found.get(source.name, ()) for source in self._sources]
        now = tuple(dict.fromkeys((*self._fixed, *(endpoint for some in found for endpoint in some))))
        if now == self._taken:
            return None
        self._taken = now
        return now

    def _follow(self, source: RouterSource) -> None:
        while not self._stop.is_set():
            self.look(source)
            self._stop.wait(source.every_s)

    def look(self, source: RouterSource) -> None:
        try:
            found = source.read()
        except (OSError, ValueError, ConfigError) as error:
            self._complain(source.name, str(error))
            return
        self._complaints.pop(source.name, None)
        if found != self._found.get(source.name):
            self._found[source.name] = found
            if not self._stop.is_set():
                self._wake()

    def _complain(self, source: str, why: str) -> None:
        if self._complaints.get(source) != why:
            self._complaints[source] = why
            logger.warning("the list of routers stays as it was: %s: %s", source, why)
