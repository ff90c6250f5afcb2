"""Define the actions that a node's tick returns. The daemon, or a test, carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.wire.codec import Buffer
from shared.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Dial:
    peer: str
    endpoint: str
    brings_pages: bool = False


@dataclass(frozen=True, slots=True)
class Outgoing:
    """`peer`: `<node id>@<epoch>` or a router's endpoint."""

    peer: str
    message: Message
    frames: Sequence[Buffer] = ()
    back: bool = False


@dataclass(frozen=True, slots=True)
class HangUp:
    peer: str


@dataclass(slots=True)
class Outbox:
    actions: list[Dial | Outgoing | HangUp] = field(default_factory=list)

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, back: bool = False) -> None:
        self.actions.append(Outgoing(peer, message, frames, back))

    def dial(self, peer: str, endpoint: str, *, brings_pages: bool = False) -> None:
        self.actions.append(Dial(peer, endpoint, brings_pages))

    def hang_up(self, peer: str) -> None:
        self.actions.append(HangUp(peer))

    def take_messages(self) -> list[Dial | Outgoing | HangUp]:
        actions, self.actions = self.actions, []
        return actions
