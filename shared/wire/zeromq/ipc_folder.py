"""Checks the folder of an ipc socket.

watch.py can't count the bytes of an ipc connection, so file modes must keep other users out.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shared.core.errors import ConfigError

SCHEME = "ipc://"


def require_private_folder(endpoint: str) -> None:
    """Raise ConfigError if another user could connect to this ipc endpoint."""
    path = endpoint.removeprefix(SCHEME)
    if not endpoint.startswith(SCHEME) or path == "*":  # libzmq makes a private folder for *
        return
    if path.startswith("@"):
        raise ConfigError(f"{endpoint}: every user of this machine can connect to a socket without a file")
    folder = Path(path).parent
    try:
        info = os.stat(folder)
    except OSError as error:
        raise ConfigError(f"can't bind {endpoint}: {error.strerror}") from error
    if info.st_uid != os.geteuid():
        raise ConfigError(f"{folder} belongs to uid {info.st_uid}: an ipc socket's folder must belong to this user")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} is open to others (mode {stat.S_IMODE(info.st_mode):o}), who could connect to {endpoint}: "
            f"chmod 700 {folder}"
        )
