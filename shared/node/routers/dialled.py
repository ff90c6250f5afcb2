"""Record the routers that a node dials: one DialledRouter per endpoint, the name that the link gives a router.

   listed             PeerUp: Hello            Welcome            off the list
      '--> DIALLED -----------------> GREETED ---------> SERVED ---------------> LEAVING
              ^                        |   ^                                        |
              |         Welcome of a   |   | the router of                          | Release: Goodbye,
              |         taken name     v   | this name is gone                      | closed, or a taken name
              |                       REFUSED                                       v
              '--- hung up --- RETURNING <--- listed again, off the list ---> PARTING --- hung up ---> forgotten

    DIALLED, GREETED, REFUSED: off the list -> PARTING        GREETED, SERVED, REFUSED: closed -> DIALLED
    LEAVING: listed again -> SERVED

If two routers use one name, the first is served and the second refused. A restarted router isn't refused: it answers at
its former endpoint, or after its former connection has closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shared.core.keys import RequestKey
from shared.node.routers.lives import RouterLife, SessionKey
from shared.wire.messages import Key
from shared.wire.parts import NOTHING_TAKEN, Taken

INFINITY = float("inf")


class RouterState(Enum):
    DIALLED = auto()  # not connected
    GREETED = auto()  # connected; it has not answered the Hello
    SERVED = auto()
    REFUSED = auto()
    LEAVING = auto()  # served until its requests have ended, but no longer listed
    PARTING = auto()  # no longer listed; it is hung up soon
    RETURNING = auto()  # like PARTING, but listed again: dialled after the hang-up


@dataclass(slots=True, eq=False)
class RouterSession:
    """What a node knows of a router until their connection ends. A served router has `life` and `key`."""

    up_since: float = -INFINITY
    hello_at: float = INFINITY  # time of the last Hello
    life: RouterLife | None = None
    key: SessionKey | None = None
    refused: RouterLife | None = None
    rival: str | None = None  # endpoint of the router that is served under the refused router's name
    taken: list[Key] = field(default_factory=list)  # keys of the Generates since the last heartbeat
    spendings: dict[RouterLife, int] = field(default_factory=dict)  # router -> number of its last Spending sent here


@dataclass(slots=True, eq=False)
class DialledRouter:
    peer: str
    state: RouterState = RouterState.DIALLED
    num_connections: int = 0
    due: float = INFINITY  # time of the next Hello or, in the states PARTING and RETURNING, of the hang-up
    silent_since: float | None = None  # since when this listed router has neither served nor refused the node
    is_reported: bool = False  # the log says that this router doesn't answer
    session: RouterSession = field(default_factory=RouterSession)

    @property
    def life(self) -> RouterLife | None:
        """Return the epoch that is served here, if any."""
        return self.session.life

    @property
    def is_listed(self) -> bool:
        return self.state not in (RouterState.LEAVING, RouterState.PARTING)

    @property
    def is_ending(self) -> bool:
        return self.state in (RouterState.PARTING, RouterState.RETURNING)

    def welcome(self, life: RouterLife, key: SessionKey) -> RouterLife | None:
        """Serve a router. Return the other epoch served at this endpoint until now, if any."""
        former, session = self.life, self.session
        session.life, session.key, session.refused, session.rival = life, key, None, None
        if self.state is not RouterState.LEAVING:
            self.state = RouterState.SERVED
        return former if former != life else None

    def refuse(self, life: RouterLife, rival: str) -> RouterLife | None:
        """Refuse a router. Return the epoch that was served at this endpoint until now, if any."""
        former, session = self.life, self.session
        session.life, session.key, session.refused, session.rival = None, None, life, rival
        self.state = RouterState.REFUSED
        return former

    def tell_taken(self) -> Taken:
        """Return what the next heartbeat tells this router."""
        session = self.session
        keys, session.taken = session.taken, []
        return NOTHING_TAKEN if session.key is None else Taken(session.key.clock_ms, keys)

    def end(self, state: RouterState, due: float = INFINITY) -> RouterLife | None:
        """End the session. Return the epoch that was served until now, if any."""
        former = self.life
        self.session, self.state, self.due = RouterSession(), state, due
        return former


class Routers:
    """`dialled`: the routers that the node dials, by endpoint."""

    def __init__(self, peers: Sequence[str]) -> None:
        self.dialled = {peer: DialledRouter(peer) for peer in peers}
        self._gone: dict[str, int] = {}  # former router -> its connections so far; their numbers must not come again

    def add_router(self, peer: str) -> None:
        self.dialled[peer] = DialledRouter(peer, num_connections=self._gone.pop(peer, 0))

    def remove(self, link: DialledRouter) -> None:
        del self.dialled[link.peer]
        self._gone[link.peer] = link.num_connections

    def listed(self) -> frozenset[str]:
        return frozenset(link.peer for link in self.dialled.values() if link.is_listed)

    def served(self) -> list[DialledRouter]:
        return [link for link in self.dialled.values() if link.life is not None]

    def welcomed(self) -> list[str]:
        return [link.peer for link in self.served()]

    def rival(self, peer: str, life: RouterLife) -> str | None:
        """Return the endpoint of another router with this router's name."""
        others = ((link.peer, link.life) for link in self.served() if link.peer != peer and link.life != life)
        return next((name for name, other in others if other and other.router_id == life.router_id), None)

    def take_heirs(self, life: RouterLife) -> list[DialledRouter]:
        """Return the routers that were refused because this ended epoch had their name. They may ask again."""
        refused = ((link, link.session.refused) for link in self.dialled.values())
        heirs = [link for link, other in refused if other is not None and other.router_id == life.router_id]
        for link in heirs:
            link.session.refused, link.session.rival, link.state = None, None, RouterState.GREETED
        return heirs

    def life(self, peer: str) -> RouterLife | None:
        link = self.dialled.get(peer)
        return None if link is None else link.life

    def serves(self, life: RouterLife) -> bool:
        """Return whether this epoch is served at any endpoint. A router may be listed twice, by name and by address."""
        return self._link_of(life) is not None

    def peer_of(self, key: RequestKey) -> str | None:
        """Return None if the key's router is unknown or in another epoch."""
        link = self._link_of(RouterLife(key.router_id, key.router_epoch))
        return None if link is None else link.peer

    def session_key_of(self, key: RequestKey) -> SessionKey | None:
        """Return None if the router is unknown."""
        link = self._link_of(RouterLife(key.router_id, key.router_epoch))
        return None if link is None else link.session.key

    def _link_of(self, life: RouterLife) -> DialledRouter | None:
        return next((link for link in self.dialled.values() if link.life == life), None)

    def is_over(self, key: RequestKey) -> bool:
        lives = (link.life for link in self.dialled.values())
        return any(life and life.router_id == key.router_id and life.epoch > key.router_epoch for life in lives)
