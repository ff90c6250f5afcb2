"""Derive every wait for a silent peer from one setting: `--node-silence-s` on routers, `--silence-s` on nodes.

    loop   The peer's loop sends nothing, but its connection answers. The peer counts as lost after the whole setting,
           because a step of a large prompt may hold a core, or the interpreter, for seconds.
    link   The connection doesn't answer. The peer counts as lost after a third of the setting.

libzmq's I/O thread answers in microseconds, without the interpreter. So only a dead, cut-off or frozen host is silent
that long.
"""

from __future__ import annotations

from dataclasses import dataclass

LINK_SHARE = 1 / 3  # share of the setting after which a mute link is dropped
PING_SHARE = 1 / 20  # longest time between two pings, as a share of the setting
MOST_PING_MS = 250  # longest time between two pings, because the other end may have a shorter setting


@dataclass(frozen=True, slots=True)
class LinkSilence:
    """The dialling end pings every `ping_ms`, and drops the link `timeout_ms` after an unanswered ping.

    The other end waits `longest_s` for a ping, but at least three times MOST_PING_MS (wire/zeromq/link_options.py)."""

    ping_ms: int
    timeout_ms: int

    @property
    def shortest_s(self) -> float:
        """Return the shortest time after which a mute peer may be dropped."""
        return self.timeout_ms / 1000

    @property
    def longest_s(self) -> float:
        """Return the time after which every mute peer has been dropped."""
        return (self.ping_ms + self.timeout_ms) / 1000


def link_silence(silence_s: float) -> LinkSilence:
    ping_ms = min(MOST_PING_MS, max(1, round(1000 * PING_SHARE * silence_s)))
    return LinkSilence(ping_ms, max(1, round(1000 * LINK_SHARE * silence_s) - ping_ms))
