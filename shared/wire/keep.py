"""A router's word on the cached pages of an ended request."""

from __future__ import annotations

from shared.wire.parts import Key, Message
from shared.wire.ranges import Milliseconds


class Keep(Message, frozen=True):
    """The request has ended. Its conversation is expected back within `keep_ms`, so other cached pages should be
    evicted first. 0: it will hardly come back, so its pages should be evicted first. A node may ignore this."""

    key: Key
    keep_ms: Milliseconds
