"""`baton up` as a child process for a measurement: started on a free port, ready when this returns, stopped with it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploy.cluster.own_cluster import own_cluster

READY_TIMEOUT_S = 900.0  # kernels that no cache has are compiled before


@contextlib.contextmanager
def baton_up(*flags: str) -> Iterator[int]:
    """Yields the HTTP port."""
    own = ("--start-timeout-s", str(READY_TIMEOUT_S), "--sampling-defaults", "neutral")
    with (
        tempfile.TemporaryDirectory() as folder,
        own_cluster([*own, *flags], Path(folder) / "up.log", READY_TIMEOUT_S) as address,
    ):
        yield int(address.rpartition(":")[2])
