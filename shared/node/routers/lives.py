"""Record the routers that a node serves, their epochs, and the router that owns each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.core.keys import RequestKey

DRIFT = 0.001  # relative drift between two clocks that NTP slews by 500 ppm each


@dataclass(frozen=True, slots=True)
class RouterLife:
    """A router in one epoch. A restart changes only the epoch."""

    router_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RoutersWord:
    """A router's ticket key and clock, from the Welcome of one epoch."""

    key: bytes  # empty: the router sent no key, so no ticket is genuine
    ahead_s: float  # our clock minus the router's clock, plus the Welcome's transit time: an upper bound
    since: float


def local_time(word: RoutersWord, deadline_ms: int, now: float) -> float:
    """Convert a router's deadline to our clock. The result may be a little late, but never early."""
    return deadline_ms / 1000 + word.ahead_s + DRIFT * (now - word.since)


class Refusal(NamedTuple):
    life: RouterLife
    rival: str  # endpoint of the router that is served under this name


class Routers:
    """The routers by endpoint, the name that the link gives a router. A router is known once its Welcome has come.

    If two routers use one name, the first is served and the second refused. A restarted router isn't refused: it
    answers at its former endpoint, or after its former connection has closed.

        dialled --Welcome--> served --closed--> dialled         (leaving the list: membership.py)
           '-----Welcome under a name that is served elsewhere--> refused --served router closed--> dialled
    """

    def __init__(self, peers: tuple[str, ...]) -> None:
        self.listed = frozenset(peers)
        self.peers = dict.fromkeys(peers)  # dialled: listed routers, and routers that the node is leaving
        self.leaving: set[str] = set()  # served, but no longer listed
        self._lives: dict[str, RouterLife] = {}  # peer -> its epoch
        self._refused: dict[str, Refusal] = {}
        self._words: dict[str, RoutersWord] = {}

    def rival(self, peer: str, life: RouterLife) -> str | None:
        """Return the endpoint of another router with this router's name."""
        others = ((name, other) for name, other in self._lives.items() if name != peer and other != life)
        return next((name for name, other in others if other.router_id == life.router_id), None)

    def welcome(self, peer: str, life: RouterLife, word: RoutersWord) -> RouterLife | None:
        """Serve a router. Return the other epoch served at this endpoint until now, if any."""
        self._refused.pop(peer, None)
        former = self._lives.get(peer)
        self._lives[peer], self._words[peer] = life, word
        return former if former != life else None

    def refuse(self, peer: str, life: RouterLife, rival: str) -> RouterLife | None:
        """Refuse a router. Return the epoch that was served at this endpoint until now, if any."""
        self._refused[peer] = Refusal(life, rival)
        return self._pop(peer)

    def refused_for(self, peer: str) -> str | None:
        """Return the endpoint that is served under the refused router's name."""
        refusal = self._refused.get(peer)
        return refusal and refusal.rival

    def closed(self, peer: str) -> RouterLife | None:
        self._refused.pop(peer, None)
        return self._pop(peer)

    def _pop(self, peer: str) -> RouterLife | None:
        self._words.pop(peer, None)
        return self._lives.pop(peer, None)

    def take_heirs(self, life: RouterLife) -> list[str]:
        """Return the routers that were refused because this ended epoch had their name. They may ask again."""
        heirs = [peer for peer, refusal in self._refused.items() if refusal.life.router_id == life.router_id]
        for peer in heirs:
            del self._refused[peer]
        return heirs

    def life(self, peer: str) -> RouterLife | None:
        return self._lives.get(peer)

    def serves(self, life: RouterLife) -> bool:
        """Return whether this epoch is served at any endpoint. A router may be listed twice, by name and by address."""
        return life in self._lives.values()

    def lives(self) -> dict[str, RouterLife]:
        return dict(self._lives)

    def welcomed(self) -> list[str]:
        return list(self._lives)

    def peer_of(self, key: RequestKey) -> str | None:
        """Return None if the key's router is unknown or in another epoch."""
        wanted = RouterLife(key.router_id, key.router_epoch)
        return next((peer for peer, life in self._lives.items() if life == wanted), None)

    def word_of(self, key: RequestKey) -> RoutersWord | None:
        """Return None if the router is unknown."""
        peer = self.peer_of(key)
        return None if peer is None else self._words[peer]

    def is_over(self, key: RequestKey) -> bool:
        return any(life.router_id == key.router_id and life.epoch > key.router_epoch for life in self._lives.values())
