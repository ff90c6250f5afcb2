"""Defines the address of a KV pool on the same host."""

from __future__ import annotations

import msgspec

from shared.wire.ranges import Count, Unsigned


class PoolRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a peer on the same host opens P's pool read-only: /proc/<pid>/fd/<fd>. The peer compares these sizes with the
    file's size.
    """

    pid: Count
    fd: Count
    num_pages: Count
    page_bytes: Count
    nonce: Unsigned  # also stored in the pool, to detect a recycled pid
