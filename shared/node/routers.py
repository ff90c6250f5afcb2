"""The routers a node serves: which one a request belongs to, and whether it still lives. Knows no sockets."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.keys import RequestKey


@dataclass(frozen=True, slots=True)
class RouterLife:
    """One life of a router: a restarted one has the same id and another epoch."""

    router_id: str
    epoch: int


class Routers:
    """Link names of routers (their endpoints), and who answered there. A router without Welcome is not known."""

    def __init__(self, peers: tuple[str, ...]) -> None:
        self.peers = peers
        self._lives: dict[str, RouterLife] = {}  # peer -> its life

    def welcome(self, peer: str, life: RouterLife) -> list[RouterLife]:
        """Gives the lives that are over now: an older epoch of the same router, here or at another endpoint."""
        over = [
            (name, old)
            for name, old in self._lives.items()
            if old != life and (name == peer or old.router_id == life.router_id)
        ]
        for name, _ in over:
            del self._lives[name]
        self._lives[peer] = life
        return [old for _, old in over]

    def closed(self, peer: str) -> RouterLife | None:
        return self._lives.pop(peer, None)

    def life(self, peer: str) -> RouterLife | None:
        return self._lives.get(peer)

    def welcomed(self) -> list[str]:
        return list(self._lives)

    def peer_of(self, key: RequestKey) -> str | None:
        """Where this key's router is reached; None when it is unknown or in another life."""
        wanted = RouterLife(key.router_id, key.router_epoch)
        return next((peer for peer, life in self._lives.items() if life == wanted), None)

    def is_over(self, key: RequestKey) -> bool:
        """A newer life of the key's router is known."""
        return any(life.router_id == key.router_id and life.epoch > key.router_epoch for life in self._lives.values())
