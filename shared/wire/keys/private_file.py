"""Checks that only this user can use key files and their folders."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shared.core.errors import ConfigError


def require_private(info: os.stat_result, path: Path) -> None:
    """Raise ConfigError if another user could read or change the path."""
    if info.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to uid {info.st_uid}: keys must belong to this user")
    if stat.S_IMODE(info.st_mode) & 0o077:
        mode = "700" if stat.S_ISDIR(info.st_mode) else "600"
        raise ConfigError(f"{path} is open to others (mode {stat.S_IMODE(info.st_mode):o}): chmod {mode} {path}")


def read_private(file: Path, most_bytes: int) -> str:
    """Raise ConfigError if the file is not private, is too large or is not text."""
    try:
        with file.open("rb") as opened:
            require_private(os.fstat(opened.fileno()), file)
            data = opened.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise ConfigError(f"{file} is larger than {most_bytes} bytes")
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text: is it the right file?") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
