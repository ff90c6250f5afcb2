"""To whom a bound socket listens: a node whose key is bound to the name it says, in its newest life. Knows nothing of
sockets; without keys it takes a name as it is said."""

from __future__ import annotations

from shared.core.errors import WireError
from shared.observe.metric_names import REFUSED_EPOCH, REFUSED_IDENTITY
from shared.wire.key_files import KEY_BYTES
from shared.wire.keyring import KeyRing
from shared.wire.peers import Refused, parse_peer


class PeerGate:
    """Of the lives of one node that are connected, the newest is listened to. When its connections are gone, an older
    one may speak again: a clock that went back makes the next life look like an older one."""

    def __init__(self, ring: KeyRing | None) -> None:
        self._ring = ring
        self._newest: dict[str, int] = {}  # node id -> epoch of its newest life that is connected

    def check(self, peer: str, user_id: str) -> bytes:
        """WireError for a name that is none, Refused for one that is not this peer's to say, or of an older life.

        user_id: the public key that its connection was let in with. Gives it as bytes, empty without keys."""
        node_id, epoch = parse_peer(peer)
        key = self._check_key(node_id, user_id) if self._ring is not None else b""
        if epoch < self._newest.get(node_id, 0):
            raise Refused(REFUSED_EPOCH, f"{node_id}: a newer life of it is here than {epoch:x}")
        self._newest[node_id] = epoch
        return key

    def _check_key(self, node_id: str, user_id: str) -> bytes:
        assert self._ring is not None
        key = key_of_user(user_id)
        owner = self._ring.node_of(key)
        if owner is None:
            raise Refused(REFUSED_IDENTITY, "its key is no longer allowed")
        if owner != node_id:
            raise Refused(REFUSED_IDENTITY, f"it says that it is {node_id}, and its key is that of {owner}")
        return key

    def gone(self, peer: str) -> None:
        """Its last connection has closed."""
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
