"""A part of Heartbeat."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.wire.ranges import MAX_TAKEN, Milliseconds
from shared.wire.request_key import Key


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """What the node has read on this connection to the receiver. Connections keep the order, so a Generate that was
    sent before that Welcome, and that no heartbeat has listed, will never come."""

    clock_ms: Milliseconds  # of the newest Welcome; 0: the node does not tell
    keys: Annotated[list[Key], Meta(max_length=MAX_TAKEN)]  # of the Generates taken or refused since the last heartbeat


NOTHING_TAKEN = Taken(0, [])
