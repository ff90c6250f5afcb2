"""Reads the HTTP API's key files. A file has one line, and only its owner may read it."""

from __future__ import annotations

from pathlib import Path

from shared.core.errors import ConfigError
from shared.wire.keys.private_file import read_private

MAX_KEY_BYTES = 4096


def read_key(path: str, flag: str) -> str:
    """Return the key; "" without a path.

    Raises ConfigError with the flag's name if the file is missing, empty, not ASCII, a table or readable by others.
    """
    if not path:
        return ""
    try:
        key = read_private(Path(path).expanduser(), MAX_KEY_BYTES).strip()
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error.message}") from None
    if not key.isascii():
        raise ConfigError(f"{flag} {path}: a key has only ASCII characters: is this the right file?")
    if "\n" in key or key.startswith("["):
        raise ConfigError(
            f"{flag} {path}: this command needs a file with one key, in one line. A router's table of keys holds only "
            "hashes, which open nothing"
        )
    if not key:
        raise ConfigError(f"{flag} {path}: the file is empty")
    return key
