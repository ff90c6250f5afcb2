"""Raises the soft limit on open descriptors to the hard limit, if the system allows it."""

from __future__ import annotations

import contextlib
import resource


def raise_limit() -> int:
    """Return the new soft limit. An accepted connection takes one descriptor, a dialled peer four."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems refuse their own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
