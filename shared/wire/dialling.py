"""Under which key a dialled peer must answer, and when to dial again after it did not. Knows nothing of what is sent.

A node is dialled as its Hello said, `endpoint#key`. A router's endpoint stands in a configuration, without a key: any
router's key may answer there, so each is tried in turn, the one that answered last time first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shared.config.endpoints import KEY_MARK
from shared.core.errors import ConfigError, WireError
from shared.wire.key_files import parse_key
from shared.wire.keyring import KeyRing
from shared.wire.peers import parse_peer
from shared.wire.sockets import DealerSocket

PAUSE_S = 0.3  # after a handshake that failed
logger = logging.getLogger(__name__)


class Dialling:
    """One per NodeLinks. Without a ring there are no keys, and peers that name one can't be dialled."""

    def __init__(self, ring: KeyRing | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring = ring
        self._clock = clock
        self._keys = ring.now if ring is not None else None
        self._answered: dict[str, bytes] = {}  # a router's endpoint -> the key that it answered under
        self._due: dict[str, float] = {}  # peer -> when to dial it again

    def choose(self, peer: str, endpoint: str) -> tuple[str, bytes | None]:
        """(address, key of whoever must be there); None: a router, and no router's key is allowed, for now.

        ConfigError for what must not be dialled."""
        address, mark, key = endpoint.partition(KEY_MARK)
        if self._ring is None:
            if mark:
                raise ConfigError(f"{address[:200]} needs keys (`baton keys`), and this node has none")
            return address, b""
        if mark:
            self._require_node(peer)
            return address, parse_key(key, f"the key behind {address[:200]}")
        if peer != endpoint:
            raise ConfigError(f"{peer} at {address[:200]} has no key, and this node has: all of a cluster, or none")
        return address, self._router_key(address, b"")

    def _require_node(self, peer: str) -> None:
        assert self._ring is not None
        try:
            node_id, _ = parse_peer(peer)
        except WireError as error:
            raise ConfigError(error.message) from None
        if not self._ring.is_node(node_id):
            raise ConfigError(f"{node_id} is no node whose key is allowed")

    def _router_key(self, address: str, after: bytes) -> bytes | None:
        """The key to try after that one; None while no router is allowed."""
        assert self._ring is not None
        keys = self._ring.router_keys()
        if not keys:
            logger.warning("no router's key is allowed (`baton keys show`): %s waits for one", address[:200])
            return None
        if not after and self._answered.get(address) in keys:
            return self._answered[address]
        return keys[(keys.index(after) + 1) % len(keys)] if after in keys else keys[0]

    def next_key(self, dealer: DealerSocket) -> bytes | None:
        """For a dealer that is opened again: the next router's key, or the same node's. None when no such key is
        allowed any more."""
        self._due.pop(dealer.name, None)
        if self._ring is None:
            return dealer.server
        if dealer.name != dealer.endpoint:
            return dealer.server if self._ring.is_node(parse_peer(dealer.name)[0]) else None
        return self._router_key(dealer.endpoint, dealer.server)

    def note(self, dealer: DealerSocket) -> None:
        """How it fares, after its `receive`."""
        if dealer.state == "up":  # perhaps after a failure: libzmq goes on trying after some of them
            if dealer.name == dealer.endpoint:
                self._answered[dealer.endpoint] = dealer.server
            self._due.pop(dealer.name, None)
        elif dealer.has_failed and dealer.name not in self._due:
            self._due[dealer.name] = self._clock() + PAUSE_S

    def later(self, peer: str) -> None:
        """It could not be dialled now."""
        self._due[peer] = self._clock() + PAUSE_S

    def forget(self, peer: str) -> None:
        """It was hung up: another dealer of that name has a fate of its own."""
        self._due.pop(peer, None)

    def due(self) -> list[str]:
        if not self._due:
            return []
        now = self._clock()
        due = [peer for peer, at in self._due.items() if at <= now]
        for peer in due:
            del self._due[peer]
        return due

    def keys_changed(self) -> bool:
        if self._ring is None or self._keys is self._ring.now:
            return False
        self._keys = self._ring.now
        return True

    def is_stale(self, dealer: DealerSocket) -> bool:
        """It shows our former key, or goes to a router whose key is no longer allowed, or to such a node."""
        ring = self._ring
        assert ring is not None
        if dealer.own != ring.now.own:
            return True
        if dealer.name == dealer.endpoint:
            return ring.router_of(dealer.server) is None
        return not ring.is_node(parse_peer(dealer.name)[0])
