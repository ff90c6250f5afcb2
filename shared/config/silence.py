"""How long a silence may last: every wait for a peer's sign of life follows from one setting.

Routers have `--node-silence-s`, nodes `--silence-s`. There are two kinds of silence, and two patiences:

    loop   the setting itself: the peer's loop has said nothing, though its connection answers. A step of a large
           prompt may hold a core, or the interpreter, for seconds, and the peer is not lost for it.
    link   a third of it: the connection does not answer. libzmq's I/O thread answers without the interpreter and needs
           microseconds of a core, so only a host that is lost, cut off or frozen stays silent that long.

With the default, 5 s: a ping every 0.25 s, and a peer that is mute is given up 1.42 to 1.67 s after it last spoke.
A peer that was frozen for a second answers in time.
"""

from __future__ import annotations

from dataclasses import dataclass

LINK_SHARE = 1 / 3  # of the setting, until a mute link is given up at the latest
PING_SHARE = 1 / 20  # of the setting, between two pings


@dataclass(frozen=True, slots=True)
class LinkSilence:
    """One end of a connection pings every `ping_ms`, and gives up `timeout_ms` after a ping that nothing followed."""

    ping_ms: int
    timeout_ms: int

    @property
    def shortest_s(self) -> float:
        """A peer that is mute for less than this is never given up."""
        return self.timeout_ms / 1000

    @property
    def longest_s(self) -> float:
        """A peer that is mute for longer than this always is."""
        return (self.ping_ms + self.timeout_ms) / 1000


def link_silence(silence_s: float) -> LinkSilence:
    """Return the patience of a link, for a setting of this many seconds."""
    ping_ms = max(1, round(1000 * PING_SHARE * silence_s))
    return LinkSilence(ping_ms, max(1, round(1000 * LINK_SHARE * silence_s) - ping_ms))
