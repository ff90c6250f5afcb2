"""Decides which key a dialled peer must have, and when to dial a peer again.

A router's configured endpoint has no key, because any router may answer there. So the routers' keys are tried in turn,
beginning with the key that last worked there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shared.config.settings.endpoints import KEY_MARK, check_node_address
from shared.core.errors import ConfigError, WireError
from shared.wire.keys.key_files import parse_key
from shared.wire.keys.keyring import KeyRing
from shared.wire.peers import EPOCH_MARK, parse_peer
from shared.wire.zeromq.sockets import DealerSocket

PAUSE_S = 0.3  # pause after a failed handshake
logger = logging.getLogger(__name__)


class Dialling:
    """Owned by one NodeLinks. Without a ring this node can't dial peers with keys."""

    def __init__(self, ring: KeyRing | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring = ring
        self._clock = clock
        self._keys = ring.now if ring is not None else None
        self._answered: dict[str, bytes] = {}  # a router's endpoint -> the last key that worked
        self._due: dict[str, float] = {}  # peer -> time to dial it again

    def choose(self, peer: str, endpoint: str) -> tuple[str, bytes | None]:
        """Return the address and the peer's key: b"" without a ring, None while no router's key is allowed.

        Raises ConfigError for a peer that must not be dialled.
        """
        address, mark, key = endpoint.partition(KEY_MARK)
        if peer != endpoint and EPOCH_MARK in peer:  # a node, whose address another node names
            check_node_address(address, peer)
        if self._ring is None:
            if mark:
                raise ConfigError(f"{address[:200]} needs keys (`baton keys`), and this node has none")
            return address, b""
        if mark:
            self._require_node(peer)
            return address, parse_key(key, f"the key behind {address[:200]}")
        if peer != endpoint:
            raise ConfigError(
                f"{peer} at {address[:200]} has no key, but this node has one: give keys to a whole cluster, or none"
            )
        return address, self._router_key(address, b"")

    def _require_node(self, peer: str) -> None:
        assert self._ring is not None
        try:
            node_id, _ = parse_peer(peer)
        except WireError as error:
            raise ConfigError(error.message) from None
        if not self._ring.is_node(node_id):
            raise ConfigError(f"{node_id} is not a node with an allowed key")

    def _router_key(self, address: str, after: bytes) -> bytes | None:
        assert self._ring is not None
        keys = self._ring.router_keys()
        if not keys:
            logger.warning("no router's key is allowed (`baton keys show`): %s must wait for a key", address[:200])
            return None
        if not after and self._answered.get(address) in keys:
            return self._answered[address]
        return keys[(keys.index(after) + 1) % len(keys)] if after in keys else keys[0]

    def next_key(self, dealer: DealerSocket) -> bytes | None:
        """Return the server key with which to reopen a dealer; None if no key is allowed."""
        self._due.pop(dealer.name, None)
        if self._ring is None:
            return dealer.server
        if dealer.name != dealer.endpoint:
            return dealer.server if self._ring.is_node(parse_peer(dealer.name)[0]) else None
        return self._router_key(dealer.endpoint, dealer.server)

    def note(self, dealer: DealerSocket) -> None:
        """Call this after the dealer's `receive`."""
        if dealer.state == "up":  # libzmq may have retried by itself
            if dealer.name == dealer.endpoint:
                self._answered[dealer.endpoint] = dealer.server
            self._due.pop(dealer.name, None)
        elif dealer.has_failed and dealer.name not in self._due:
            self._due[dealer.name] = self._clock() + PAUSE_S

    def later(self, peer: str) -> None:
        self._due[peer] = self._clock() + PAUSE_S

    def forget(self, peer: str) -> None:
        """Keep a later dealer with this name from inheriting the time to redial."""
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
        """Return whether the dealer must be closed: it has our former key, or its peer's key is not allowed now."""
        ring = self._ring
        assert ring is not None
        if dealer.own != ring.now.own:
            return True
        if dealer.name == dealer.endpoint:
            return ring.router_of(dealer.server) is None
        return not ring.is_node(parse_peer(dealer.name)[0])
