"""The key for the router's /admin paths: one file per user, made by the first `baton up`."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

from shared.config.processes import ClusterConfig
from shared.observe.log import Logger

KEY_BYTES = 32


def default_path() -> Path:
    return Path.home() / ".baton" / "admin.key"


def with_admin_key(config: ClusterConfig, log: Logger) -> ClusterConfig:
    """Add a key file to the configuration, unless it names one or /admin needs no key.

    If the file can't be written, /admin is off.
    """
    if config.router.admin_key_file or config.router.admin_without_key:
        return config
    path = default_path()
    try:
        ensure_key(path)
    except (OSError, RuntimeError) as error:
        log.warning("no admin key could be written: /admin is off", path=str(path), reason=str(error))
        return config
    return replace(config, router=replace(config.router, admin_key_file=str(path)))


def ensure_key(path: Path) -> None:
    """Write the file atomically, readable by this user only. Keep an existing file."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
        os.link(fresh, path)
    except FileExistsError:
        return
    finally:
        os.unlink(fresh)
