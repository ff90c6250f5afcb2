"""`core.keys.RequestKey` on the wire."""

from __future__ import annotations

import msgspec

from shared.wire.ranges import Count, Name, Unsigned


class Key(msgspec.Struct, frozen=True, array_like=True):
    router_id: Name
    router_epoch: Unsigned
    rid: Name
    attempt: Count
    seq_index: Count
