"""The routers a node serves: which one a request belongs to, and whether it still lives. Knows no sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.core.keys import RequestKey


@dataclass(frozen=True, slots=True)
class RouterLife:
    """One life of a router: a restarted one has the same id and another epoch."""

    router_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RoutersWord:
    """How this life of a router's tickets are known, and its clock."""

    key: bytes  # empty: it gave none, and no ticket is genuine
    ahead_s: float  # our clock beside its, at most: the Welcome was under way
    since: float


class Refusal(NamedTuple):
    life: RouterLife
    rival: str  # where the router is that is served under this name


class Routers:
    """Link names of routers (their endpoints), and who answered there. A router without Welcome is not known.

    Of two that are up under one name, at two endpoints, the first is served and the second refused: a router that was
    started again answers at the former's endpoint, or after the former's connection has closed.

        dialled --Welcome--> served --closed--> dialled
           '-----Welcome under a name that is served elsewhere--> refused --that one closed--> dialled
    """

    def __init__(self, peers: tuple[str, ...]) -> None:
        self.peers = peers
        self._lives: dict[str, RouterLife] = {}  # peer -> its life, of those that are served
        self._refused: dict[str, Refusal] = {}
        self._words: dict[str, RoutersWord] = {}  # of those that are served

    def rival(self, peer: str, life: RouterLife) -> str | None:
        """Return where another router of this name is up; None when the name is free."""
        others = ((name, other) for name, other in self._lives.items() if name != peer and other != life)
        return next((name for name, other in others if other.router_id == life.router_id), None)

    def welcome(self, peer: str, life: RouterLife, word: RoutersWord) -> RouterLife | None:
        """Return the life that is over now: the one before at the same endpoint."""
        self._refused.pop(peer, None)
        former = self._lives.get(peer)
        self._lives[peer], self._words[peer] = life, word
        return former if former != life else None

    def refuse(self, peer: str, life: RouterLife, rival: str) -> RouterLife | None:
        """Return the life that is over now, as `welcome` does."""
        self._refused[peer] = Refusal(life, rival)
        return self._pop(peer)

    def refused_for(self, peer: str) -> str | None:
        """Return where the router is that keeps this one out; None when it is not refused."""
        refusal = self._refused.get(peer)
        return refusal and refusal.rival

    def closed(self, peer: str) -> RouterLife | None:
        self._refused.pop(peer, None)
        return self._pop(peer)

    def _pop(self, peer: str) -> RouterLife | None:
        self._words.pop(peer, None)
        return self._lives.pop(peer, None)

    def take_heirs(self, life: RouterLife) -> list[str]:
        """Return the routers that were refused because of this life, which is over: they may ask again."""
        heirs = [peer for peer, refusal in self._refused.items() if refusal.life.router_id == life.router_id]
        for peer in heirs:
            del self._refused[peer]
        return heirs

    def life(self, peer: str) -> RouterLife | None:
        return self._lives.get(peer)

    def welcomed(self) -> list[str]:
        return list(self._lives)

    def peer_of(self, key: RequestKey) -> str | None:
        """Where this key's router is reached; None when it is unknown or in another life."""
        wanted = RouterLife(key.router_id, key.router_epoch)
        return next((peer for peer, life in self._lives.items() if life == wanted), None)

    def word_of(self, key: RequestKey) -> RoutersWord | None:
        """Return how tickets of this key's router are known; None when it is unknown or in another life."""
        peer = self.peer_of(key)
        return None if peer is None else self._words[peer]

    def is_over(self, key: RequestKey) -> bool:
        """A newer life of the key's router is known."""
        return any(life.router_id == key.router_id and life.epoch > key.router_epoch for life in self._lives.values())
