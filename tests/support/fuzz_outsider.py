"""Somebody without a key who reaches the ports between routers and nodes: connections that say nothing, handshakes that
stop, messages that never end. One thread per kind."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from tests.support.raw_zmtp import GREETING, RawPeer

MIB = 1 << 20
MOST_SILENT = 600  # at a time, for each endpoint


class Outsider:
    """`stop` ends its threads and closes what they opened."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.counts: Counter[str] = Counter()
        self._endpoints = endpoints
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(act,), daemon=True)
            for act in (self._say_nothing, self._never_end, self._stop_early)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, act: Callable[[str], None]) -> None:
        turn = 0
        while not self._stopping.is_set():
            with contextlib.suppress(OSError):
                act(self._endpoints[turn % len(self._endpoints)])
            turn += 1

    def _say_nothing(self, endpoint: str) -> None:
        held: list[RawPeer] = []
        try:
            while len(held) < MOST_SILENT and not self._stopping.is_set():
                held.append(RawPeer(endpoint, silent=True))
            self.counts["silent"] += len(held)
            self._stopping.wait(3.0)
        finally:
            for peer in held:
                peer.close()

    def _never_end(self, endpoint: str) -> None:
        """Under a name of its own; where keys are needed it does not come so far."""
        peer = RawPeer(endpoint, "outsider@1")
        try:
            while not self._stopping.is_set():
                peer.part(bytes(MIB))
                self.counts["MiB of messages that never end"] += 1
        except OSError:
            self.counts["cut off"] += 1
        finally:
            peer.close()

    def _stop_early(self, endpoint: str) -> None:
        peer = RawPeer(endpoint, silent=True)
        try:
            peer.socket.sendall(GREETING[: self.counts["early"] % len(GREETING)])
            self.counts["early"] += 1
            self._stopping.wait(0.01)
        finally:
            peer.close()
