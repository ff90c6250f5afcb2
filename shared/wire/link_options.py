"""How a link's sockets behave: queues, patience, keys. Made from the settings here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.silence import link_silence
from shared.wire.codec import DEFAULT_LIMITS, WireLimits
from shared.wire.keyring import KeyRing
from shared.wire.watch import WatchLimits


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """`queue_messages`: most messages waiting in each direction per peer; beyond it sends are refused. A bound socket
    holds `inbox_messages` of each peer; what comes beyond them stays with TCP, and so with the peer.

    A frozen peer is closed after heartbeat_ms + heartbeat_timeout_ms, and a dial that nobody answers is given up, and
    tried again, after connect_ms. Who dials in and says nothing for silent_s is hung up; a connection that has sent
    more than unread_bytes that nobody has read is shut down (watch.py). With `ring` every connection is encrypted, and
    both of its ends prove who they are; without it this machine only may connect.
    """

    queue_messages: int = 4096
    heartbeat_ms: int = 1000
    heartbeat_timeout_ms: int = 3000
    connect_ms: int = 2000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 1000
    silent_s: float = 10.0
    unread_bytes: int = 80 << 20
    unread_bytes_in_all: int = 192 << 20
    inbox_messages: int = 4096
    limits: WireLimits = DEFAULT_LIMITS
    ring: KeyRing | None = None

    @property
    def watch_limits(self) -> WatchLimits:
        """Return what one connection may take; page frames of any size that is allowed have room."""
        unread_bytes = max(self.unread_bytes, self.limits.max_frame_bytes + (16 << 20))
        in_all = max(self.unread_bytes_in_all, 2 * unread_bytes)
        return WatchLimits(unread_bytes, in_all, self.silent_s, self.heartbeat_ms / 1000)

    @classmethod
    def for_silence(
        cls,
        silence_s: float,
        *,
        limits: WireLimits = DEFAULT_LIMITS,
        ring: KeyRing | None = None,
        inbox_messages: int = 4096,
    ) -> LinkOptions:
        """Return the options of a link whose owner takes a peer for dead after that silence: the one place where
        seconds become ZMQ's settings, for routers and nodes alike."""
        silence = link_silence(silence_s)
        return cls(
            heartbeat_ms=silence.ping_ms,
            heartbeat_timeout_ms=silence.timeout_ms,
            connect_ms=int(500 * silence_s),  # so that a second try may end within the silence, too
            limits=limits,
            ring=ring,
            inbox_messages=inbox_messages,
        )
