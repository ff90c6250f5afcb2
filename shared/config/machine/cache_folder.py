"""The folders of this user's caches, by the XDG convention."""

from __future__ import annotations

import os
from pathlib import Path

from shared.config.machine.home import can_write, private_folder


def packed_folder() -> Path:
    return baton_folder() / "packed"


def kernels_folder() -> Path:
    """Return a folder that can be written, a temporary one if need be. Raise OSError if there is none."""
    folder = baton_folder() / "kernels"
    return folder if can_write(folder) else private_folder() / "kernels"


def baton_folder() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")  # noqa: TID251
    caches = Path(named) if named.startswith("/") else Path("~/.cache").expanduser()
    return caches / "baton"
