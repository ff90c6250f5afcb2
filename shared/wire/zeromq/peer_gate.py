"""Checks each sender to a bound socket.

The sender must be a node in its newest epoch, with a key that belongs to its name. Without keys the name is trusted.
"""

from __future__ import annotations

from shared.core.errors import WireError
from shared.observe.metric_names import REFUSED_EPOCH, REFUSED_IDENTITY
from shared.wire.keys.key_files import KEY_BYTES
from shared.wire.keys.keyring import KeyRing
from shared.wire.peers import Refused, parse_peer


class PeerGate:
    """`key_of`: the connected peers' keys; b"" without keys.

    Once the newest epoch's connection has ended, an older epoch is accepted.

    A restarted node has an older epoch if its clock was set back.
    """

    def __init__(self, ring: KeyRing | None) -> None:
        self._ring = ring
        self._newest: dict[str, int] = {}  # node id -> newest connected epoch
        self.key_of: dict[str, bytes] = {}

    def check(self, peer: str, user_id: str) -> None:
        """`user_id`: the connection's proven public key, in hex.

        Raises WireError for a malformed name, and Refused for another node's name or an older epoch.
        """
        node_id, epoch = parse_peer(peer)
        key = self._check_key(node_id, user_id) if self._ring is not None else b""
        if epoch < self._newest.get(node_id, 0):
            raise Refused(REFUSED_EPOCH, f"{node_id}: a newer epoch than {epoch:x} is connected")
        self._newest[node_id], self.key_of[peer] = epoch, key

    def _check_key(self, node_id: str, user_id: str) -> bytes:
        assert self._ring is not None
        key = key_of_user(user_id)
        owner = self._ring.node_of(key)
        if owner is None:
            raise Refused(REFUSED_IDENTITY, "its key is no longer allowed")
        if owner != node_id:
            raise Refused(REFUSED_IDENTITY, f"it claims to be {node_id}, but its key is that of {owner}")
        return key

    def not_allowed(self) -> list[str]:
        """Return the connected peers whose keys have been taken away."""
        ring = self._ring
        return [peer for peer, key in self.key_of.items() if ring is not None and ring.node_of(key) is None]

    def gone(self, peer: str) -> None:
        self.key_of.pop(peer, None)
        node_id, epoch = parse_peer(peer)
        if self._newest.get(node_id) == epoch:
            del self._newest[node_id]


def key_of_user(user_id: str) -> bytes:
    try:
        key = bytes.fromhex(user_id)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise WireError("a connection without a key")
    return key
