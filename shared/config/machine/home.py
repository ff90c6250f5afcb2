"""Folders for users without a home that can be written: a container may run with any user id.

They get a private folder under the temporary one. It lasts as long as the container.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

TRITON_CACHE = "TRITON_CACHE_DIR"


def prepare_home() -> None:
    """Let this process and its children find a home, and Triton a folder for its kernels.

    Libraries look for both in their own ways, so only environment variables reach all of them."""
    variables = os.environ  # noqa: TID251
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an entry in the password file
        home = _private_or(Path("/"))
        variables["HOME"] = str(home)
    if not can_write(home / ".triton"):
        variables.setdefault(TRITON_CACHE, str(_private_or(home) / "triton"))


def _private_or(other: Path) -> Path:
    try:
        return private_folder()
    except OSError:
        return other


def private_folder() -> Path:
    """Make a folder under the temporary one, which no other user can read or write. Return the same one each time.

    Raise OSError if there is no such folder: processes load code from it, so it must not be somebody else's."""
    folder = private_name()
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def private_name() -> Path:
    return Path(tempfile.gettempdir()) / f"baton-{os.geteuid()}"


def can_write(path: Path) -> bool:
    """Whether the path, or the first folder above it that exists, can be written."""
    name = os.path.abspath(path)
    while not os.path.exists(name):  # False for what this user can't see, where Path.exists raises
        name = os.path.dirname(name)
    return os.access(name, os.W_OK | os.X_OK)
