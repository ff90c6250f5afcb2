"""Options of a link's sockets, from the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.config.settings.silence import MOST_PING_MS, link_silence
from shared.wire.codec import DEFAULT_LIMITS, WireLimits
from shared.wire.keys.keyring import KeyRing
from shared.wire.zeromq.watch import WatchLimits

PINGS_MISSED = 3  # a caller counts as mute after this number of missed pings


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Sizes are in messages or bytes, times in ms or seconds. watch.py enforces the limits on connections. A
    caller is a peer that dialled in.

    - queue_messages: limit on the messages queued for a peer; further sends are refused.
    - heartbeat_ms, heartbeat_timeout_ms: a frozen peer's connection is closed after the sum of both times.
    - connect_ms: an unanswered dial is tried again after this time.
    - caller_bytes: the largest part that a caller may send. 0 means the general limits.
    - ring: encrypts connections, and both ends prove who they are. Without a ring only this machine may connect.
    """

    queue_messages: int = 4096
    heartbeat_ms: int = MOST_PING_MS
    heartbeat_timeout_ms: int = 3000
    connect_ms: int = 2000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 1000
    silent_s: float = 10.0
    unread_bytes: int = 80 << 20
    unread_bytes_in_all: int = 192 << 20
    caller_bytes: int = 0
    brings_pages: bool = False
    limits: WireLimits = DEFAULT_LIMITS
    ring: KeyRing | None = None
    after_burst: Callable[[], None] | None = None  # called on watch.py's thread after a burst of unread bytes

    @property
    def watch_limits(self) -> WatchLimits:
        """Return limits that leave room for the largest page frame."""
        unread_bytes = max(self.unread_bytes, self.limits.max_frame_bytes + (16 << 20))
        in_all = max(self.unread_bytes_in_all, 2 * unread_bytes)
        return WatchLimits(
            unread_bytes,
            in_all,
            caller_bytes=4 * self.caller_bytes,
            callers_bytes_in_all=32 * self.caller_bytes,
            silent_s=self.silent_s,
            heartbeat_s=self.heartbeat_ms / 1000,
            mute_s=max((self.heartbeat_ms + self.heartbeat_timeout_ms) / 1000, PINGS_MISSED * MOST_PING_MS / 1000),
        )

    @classmethod
    def for_silence(
        cls,
        silence_s: float,
        *,
        limits: WireLimits = DEFAULT_LIMITS,
        ring: KeyRing | None = None,
        caller_bytes: int = 0,
    ) -> LinkOptions:
        """A peer counts as mute after a third of `silence_s`, and as lost after all of it."""
        silence = link_silence(silence_s)
        return cls(
            heartbeat_ms=silence.ping_ms,
            heartbeat_timeout_ms=silence.timeout_ms,
            connect_ms=int(500 * silence_s),  # half of silence_s, to leave time for a second dial
            limits=limits,
            ring=ring,
            caller_bytes=caller_bytes,
        )
