"""Defines the address of a KV pool on the same host."""

from __future__ import annotations

import msgspec

from shared.wire.ranges import Count, Unsigned


class PoolRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tells a peer on the same host how to open P's pool read-only, by /proc/<pid>/fd/<fd>. The peer compares these
    sizes with the size of the file.
    """

    pid: Count
    fd: Count
    num_pages: Count
    page_bytes: Count
    nonce: Unsigned  # also stored in the pool, to detect a recycled pid
