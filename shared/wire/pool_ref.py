"""The address of a KV pool on the same host."""

from __future__ import annotations

import msgspec

from shared.wire.ranges import Count, Unsigned


class PoolRef(msgspec.Struct, frozen=True):
    """A peer on the same host opens P's pool read-only as /proc/<pid>/fd/<fd>, and compares these sizes with the file's
    size."""

    pid: Count
    fd: Count
    num_pages: Count
    page_bytes: Count
    nonce: Unsigned  # also stored in the pool, to detect a recycled pid
