"""Messages of transports that need a process group per pair of nodes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.wire.parts import Message
from shared.wire.ranges import MAX_STORE_BYTES, MAX_TOKENS, Count, Name, Text


class Join(Message, frozen=True):
    """D asks P to join a process group with D. D never reuses a group number within its epoch."""

    transport: Name
    group: Count


class StoreEntry(Message, frozen=True):
    """One end of a process group tells the other an entry of the group's store, so that both can connect."""

    group: Count
    name: Name
    value: Annotated[bytes, Meta(max_length=MAX_STORE_BYTES)]


class Take(Message, frozen=True):
    """D asks P for this part of these pages, as transfer number `order` of the group. P must send this part."""

    group: Count
    order: Count
    pages: Annotated[list[Count], Meta(max_length=MAX_TOKENS)]
    first_layer: Count
    num_layers: Count


class Broken(Message, frozen=True):
    """The process group has ended. Its outstanding transfers will not come."""

    group: Count
    reason: Text
