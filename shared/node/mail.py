"""What leaves a node in one tick. Knows nothing of sockets: the daemon carries it out, tests do it by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.wire.codec import Buffer
from shared.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Start a connection (again: nothing happens). `peer` is what the link will call it."""

    peer: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class Outgoing:
    """`peer` is a link's name of it: `<node id>@<epoch>`, or a router's endpoint. Frames are page contents."""

    peer: str
    message: Message
    frames: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class HangUp:
    peer: str


@dataclass(slots=True)
class Outbox:
    """In the order in which it must be done."""

    actions: list[Dial | Outgoing | HangUp] = field(default_factory=list)

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> None:
        self.actions.append(Outgoing(peer, message, frames))

    def dial(self, peer: str, endpoint: str) -> None:
        self.actions.append(Dial(peer, endpoint))

    def hang_up(self, peer: str) -> None:
        self.actions.append(HangUp(peer))

    def take(self) -> list[Dial | Outgoing | HangUp]:
        actions, self.actions = self.actions, []
        return actions
