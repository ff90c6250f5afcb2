"""A part of Heartbeat."""

from __future__ import annotations

import msgspec

from shared.wire.ranges import Count


class OthersLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load that all routers, except the receiver of this message, put on the node."""

    routers: Count  # routers with requests on this node
    sequences: Count  # running and waiting sequences
    pages: Count
    waiting_tokens: Count


NO_OTHERS = OthersLoad(0, 0, 0, 0)
