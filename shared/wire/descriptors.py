"""How many files and sockets this process may open."""

from __future__ import annotations

import contextlib
import resource


def raise_limit() -> int:
    """Raise the soft limit of descriptors to the hard one; return it. Each connection takes one, each peer that is
    dialled four."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system where the hard limit is beyond what it allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
