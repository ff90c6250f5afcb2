"""Detect dialled nodes that do not answer.

    dialled -> up -> gone (hung up)
       '--nothing for silence_s: overdue, so unreachable.

The link reports closed connections and failed dials (PeerClosed), but not a silent peer. PeerUp or any message shows
that a peer is up.
"""

from __future__ import annotations


class Reach:
    """Owned by the prefill side. Has only peers that this node dialled."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._silent_since: dict[str, float | None] = {}  # None if the peer has answered
        self._looked_at: float | None = None

    def dialled(self, peer: str, now: float) -> None:
        self._silent_since.setdefault(peer, now)

    def up(self, peer: str) -> None:
        if peer in self._silent_since:
            self._silent_since[peer] = None

    def gone(self, peer: str) -> None:
        self._silent_since.pop(peer, None)

    def overdue(self, now: float) -> list[str]:
        """Return the peers that have been silent for too long. Call this in every round.

        The time between two rounds counts as at most half of `silence_s`: after a long step, answers may be unread.
        """
        absence = 0.0 if self._looked_at is None else now - self._looked_at - self._silence_s / 2
        self._looked_at = now
        if absence > 0:
            self._silent_since = {
                peer: since if since is None else since + absence for peer, since in self._silent_since.items()
            }
        return [
            peer for peer, since in self._silent_since.items() if since is not None and now - since >= self._silence_s
        ]
