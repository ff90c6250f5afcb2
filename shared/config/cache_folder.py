"""Where this user's caches are, by the XDG convention."""

from __future__ import annotations

import os
from pathlib import Path


def packed_folder() -> Path:
    """Return the folder of packed weights."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(named) if named.startswith("/") else Path("~/.cache").expanduser()
    return caches / "baton" / "packed"
