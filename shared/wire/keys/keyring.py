"""Holds a router's or node's own keys and the allowed keys. Rereads changed files without a restart.

A node listens with a key that it makes at its start. Routers learn this key from Hello (`endpoint#key`) and pass it to
peers, so no later process on that port can pose as the node. A router listens with its own key, which nodes know in
advance. A node dials with its own key, which is the node's identity.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from shared.core.errors import ConfigError
from shared.wire.keys.key_files import (
    ALLOWED,
    NODE,
    ROUTER,
    SECRET,
    AllowedKeys,
    KeyPair,
    names_with_secret,
    new_pair,
    read_allowed,
    read_pair,
    require_folder,
)

logger = logging.getLogger(__name__)
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Keys:
    own: KeyPair
    allowed: AllowedKeys


class KeyRing:
    """One thread calls `refresh`, which replaces `now`. Any thread may read `now`."""

    def __init__(self, folder: Path, kind: str, name: str) -> None:
        """Raise ConfigError if the own key is missing or not allowed."""
        self.kind = kind
        self.name = name
        self._folder = folder
        self._stamp = self._look()
        self._complained = ""
        self.now = self._read()
        self._life = new_pair()

    def listener(self, keys: Keys) -> KeyPair:
        return keys.own if self.kind == ROUTER else self._life

    def node_of(self, public: bytes) -> str | None:
        entry = self.now.allowed.of_key(public)
        return entry.name if entry is not None and entry.kind == NODE else None

    def router_of(self, public: bytes) -> str | None:
        entry = self.now.allowed.of_key(public)
        return entry.name if entry is not None and entry.kind == ROUTER else None

    def is_node(self, name: str) -> bool:
        return any(entry.kind == NODE for entry in self.now.allowed.of_name(name))

    def router_keys(self) -> list[bytes]:
        """Return the routers' allowed keys, newest first."""
        return [entry.public for entry in reversed(self.now.allowed.of_kind(ROUTER))]

    def refresh(self) -> bool:
        """Reread changed files, and return whether the keys changed. Log unusable files once, and keep the old keys."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        try:
            keys = self._read()
        except (ConfigError, OSError) as error:
            if str(error) != self._complained:
                self._complained = str(error)
                logger.warning("the keys are unchanged, because the files can't be used: %s", error)
            return False
        self._stamp, self._complained, self.now = stamp, "", keys
        logger.warning("read the keys again: %d are allowed", len(keys.allowed.entries))
        return True

    def _read(self) -> Keys:
        own, allowed = read_pair(self._folder, self.name), read_allowed(self._folder)
        entry = allowed.of_key(own.public)
        if entry is None or entry.name != self.name:
            raise ConfigError(
                f"{self._folder / ALLOWED} does not list the key of {self.name}: is this another cluster's file?"
            )
        if entry.kind != self.kind:
            raise ConfigError(f"{self.name} is a {entry.kind}'s key in {self._folder}, but this is a {self.kind}")
        return Keys(own, allowed)

    def _look(self) -> Stamp:
        stamps = []
        for name in (ALLOWED, self.name + SECRET):
            try:
                info = os.stat(self._folder / name)
            except OSError:
                stamps.append((0, 0, 0))
            else:
                stamps.append((info.st_ino, info.st_mtime_ns, info.st_ctime_ns))
        return tuple(stamps)


def ring_of_router(folder: str, router_id: str) -> KeyRing | None:
    return _ring_of(folder, ROUTER, router_id)


def ring_of_node(folder: str, node_id: str) -> KeyRing | None:
    return _ring_of(folder, NODE, node_id)


def _ring_of(folder: str, kind: str, name: str) -> KeyRing | None:
    """Return None without a folder. Without a name, take the only one of this kind with a secret in the folder."""
    if not folder:
        return None
    path = Path(folder).expanduser()
    return KeyRing(path, kind, name or only_one(path, kind))


def only_one(folder: Path, kind: str) -> str:
    """Raise ConfigError unless exactly one name is found."""
    require_folder(folder)
    names = [entry.name for entry in read_allowed(folder).of_kind(kind)]
    here = [name for name in names_with_secret(folder) if name in names]
    if len(here) != 1:
        raise ConfigError(
            f"--keys {folder} holds {len(here)} {kind}s' secrets ({', '.join(here)}): choose with --{kind}-id"
        )
    return here[0]
