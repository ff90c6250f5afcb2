"""Decode nodes that were dialled and do not answer. Known by words alone: a dial, PeerUp, anything that the peer sends.

    dialled -> up -> gone (hung up)
       '--nothing for silence_s: overdue, so can't be reached

A link that closes, or a dial that is given up, is told by the link itself (PeerClosed). Nobody tells of a peer that
takes the connection and then says nothing, not even who it is.
"""

from __future__ import annotations


class Reach:
    """Owned by the prefill side. Holds the peers of links that are dialled now, no others."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._silent_since: dict[str, float | None] = {}  # None: it has answered
        self._looked_at: float | None = None

    def dialled(self, peer: str, now: float) -> None:
        """Dialling what is dialled already changes nothing."""
        self._silent_since.setdefault(peer, now)

    def up(self, peer: str) -> None:
        if peer in self._silent_since:
            self._silent_since[peer] = None

    def gone(self, peer: str) -> None:
        self._silent_since.pop(peer, None)

    def overdue(self, now: float) -> list[str]:
        """Return the peers that have been silent for too long. To be called every round: a late round is our own
        absence (frozen, or one long step), in which no answer could be read: it counts for half a silence at most."""
        absence = 0.0 if self._looked_at is None else now - self._looked_at - self._silence_s / 2
        self._looked_at = now
        if absence > 0:
            self._silent_since = {
                peer: since if since is None else since + absence for peer, since in self._silent_since.items()
            }
        return [
            peer for peer, since in self._silent_since.items() if since is not None and now - since >= self._silence_s
        ]
