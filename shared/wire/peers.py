"""The names of peers, the events that a link reports, and the counts of dropped messages.

A peer's name is `<node id>@<epoch in hex>`, so a restarted node is another peer.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from shared.core.errors import ConfigError, WireError
from shared.observe.metric_names import REFUSED_KEY, REFUSED_PREFIX, REFUSED_REASONS
from shared.wire.codec import Buffer
from shared.wire.messages import AnyMessage, Begun, Goodbye, Heartbeat, Hello, Offer, Scores, Tokens, Unwelcome
from shared.wire.unreadable import Unreadable

logger = logging.getLogger(__name__)
EPOCH_MARK = "@"  # between a node's id and its epoch
MAX_IDENTITY_BYTES = 255
MAX_LOGGED_KINDS = 200
REFUSED_COUNT = {reason: f"wire_{REFUSED_PREFIX}{reason}" for reason in REFUSED_REASONS}
METRIC_OF_COUNT = {"wire_dropped": "wire_errors"} | {
    name: name.removeprefix("wire_") for name in REFUSED_COUNT.values()
}


class Refused(WireError, code="refused"):
    """A sender claims to be another peer, or a newer process has replaced the sender. `reason`: one of the reasons in
    metric_names."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Received:
    """`frames` (page contents) are views of the message's memory, and keep this memory alive."""

    peer: str
    message: AnyMessage
    frames: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer that we dialled has answered, perhaps after a reconnect. It expects a Hello. `peer`: its name here."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The connection is gone (closed, reset, or silent beyond the heartbeat), can't be used, or can't be made.

    `accepted`: the peer dialled this connection. Two prefill nodes may dial each other, and either of the two
    connections may end alone. `gave_up`: the daemon says so after a refused send. The link may still have the
    connection.
    """

    peer: str
    accepted: bool = False
    gave_up: bool = False


Inbound = Received | Unreadable | PeerUp | PeerClosed


def peer_name(node_id: str, epoch: int) -> str:
    name = f"{node_id}{EPOCH_MARK}{epoch:x}"
    if not node_id or EPOCH_MARK in node_id or epoch < 0 or len(name.encode()) > MAX_IDENTITY_BYTES:
        raise ConfigError(f"{node_id!r} can't be a node id: it must have 1 to 200 characters, and no @")
    return name


def parse_peer(name: str) -> tuple[str, int]:
    """Return (node id, epoch). Raises WireError for a malformed name."""
    node_id, _, epoch = name.partition(EPOCH_MARK)
    try:
        if node_id and epoch and peer_name(node_id, int(epoch, 16)) == name:
            return node_id, int(epoch, 16)
    except (ValueError, ConfigError):
        pass
    raise WireError(f"{name[:80]!r} is not a node id with an epoch")


def check_sender(peer: str, message: AnyMessage) -> None:
    """Raise WireError if a node's message names another node or epoch."""
    if isinstance(message, Hello | Heartbeat | Goodbye | Begun | Scores | Tokens | Unwelcome):
        claimed = message.node_id, message.epoch
    elif isinstance(message, Offer):
        claimed = message.source_node, message.source_epoch
    else:
        return
    if claimed != parse_peer(peer):
        raise WireError(f"{type(message).__name__} of {claimed[0]}@{claimed[1]:x} sent by {peer}")


class WireTotals:
    """Computes the growth of a link's counts since the last `take`, by metric name."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    def take(self, counts: Counter[str]) -> dict[str, int]:
        new = {
            METRIC_OF_COUNT[name]: total - self._taken[name]
            for name, total in counts.items()
            if name in METRIC_OF_COUNT
        }
        self._taken = counts.copy()
        return {name: amount for name, amount in new.items() if amount}


class WireStats:
    """Logs each kind of bad frame once per peer."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def dropped(self, peer: str, error: WireError) -> None:
        self.counts["wire_dropped"] += 1
        if isinstance(error, Refused):
            self.counts[REFUSED_COUNT[error.reason]] += 1
        kind = (peer, error.message.partition(":")[0][:40])
        if kind not in self._logged and len(self._logged) < MAX_LOGGED_KINDS:
            self._logged.add(kind)
            logger.warning("dropped a message of %s: %s (further ones are only counted)", peer, error.message[:200])

    def shut_out(self, what: str, reason: str = REFUSED_KEY) -> None:
        self.counts[REFUSED_COUNT[reason]] += 1
        if (what, "") not in self._logged:
            self._logged.add((what, ""))
            logger.warning("refused a connection: %s (further ones are only counted)", what)

    def refused(self) -> None:
        """Count a send that found a full queue or no peer."""
        self.counts["wire_sends_refused"] += 1
