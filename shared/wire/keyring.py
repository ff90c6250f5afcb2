"""What one router or node knows of its cluster's keys: its own, and who else is allowed. Follows the files while it
runs, so that keys are added, rotated and taken away without a restart. Knows nothing of sockets.

A node listens under a key made for this life of it, which its Hello tells the routers (`endpoint#key`) and they tell
its peers: nobody can take a later process on the same port for it. A router listens under its own key, which is known
before anything is said. Both dial under their own key, and that is who they are.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from shared.core.errors import ConfigError
from shared.wire.key_files import (
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
    """One reading of the files."""

    own: KeyPair
    allowed: AllowedKeys


class KeyRing:
    """`now` is replaced as a whole, by the one thread that calls `refresh`; any thread may read it."""

    def __init__(self, folder: Path, kind: str, name: str) -> None:
        """ConfigError says what is missing."""
        self.kind = kind
        self.name = name
        self._folder = folder
        self._stamp = self._look()
        self._complained = ""
        self.now = self._read()
        self._life = new_pair()

    def listener(self, keys: Keys) -> KeyPair:
        """The pair that a bound socket has, by that reading."""
        return keys.own if self.kind == ROUTER else self._life

    def node_of(self, public: bytes) -> str | None:
        """Which node this key proves its holder to be; None when it is nobody's any more, or a router's."""
        entry = self.now.allowed.find(public)
        return entry.name if entry is not None and entry.kind == NODE else None

    def router_of(self, public: bytes) -> str | None:
        entry = self.now.allowed.find(public)
        return entry.name if entry is not None and entry.kind == ROUTER else None

    def is_node(self, name: str) -> bool:
        return any(entry.kind == NODE for entry in self.now.allowed.of_name(name))

    def router_keys(self) -> list[bytes]:
        """The newest first."""
        return [entry.public for entry in reversed(self.now.allowed.of_kind(ROUTER))]

    def refresh(self) -> bool:
        """Whether the files have brought something new. What can't be taken is told once, and the old stays."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        try:
            keys = self._read()
        except (ConfigError, OSError) as error:
            if str(error) != self._complained:
                self._complained = str(error)
                logger.warning("keys stay as they were: %s", error)
            return False
        self._stamp, self._complained, self.now = stamp, "", keys
        logger.warning("keys were read again: %d are allowed", len(keys.allowed.entries))
        return True

    def _read(self) -> Keys:
        own, allowed = read_pair(self._folder, self.name), read_allowed(self._folder)
        entry = allowed.find(own.public)
        if entry is None or entry.name != self.name:
            raise ConfigError(
                f"{self._folder / ALLOWED} does not list the key of {self.name}: is it another cluster's?"
            )
        if entry.kind != self.kind:
            raise ConfigError(f"{self.name} is a {entry.kind}'s key in {self._folder}, and this is a {self.kind}")
        return Keys(own, allowed)

    def _look(self) -> Stamp:
        """Changes whenever a file was written or replaced."""
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
    """Return the ring of that router or, without an id, of the one router whose secret is here; None without a
    folder."""
    if not folder:
        return None
    path = Path(folder).expanduser()
    return KeyRing(path, ROUTER, router_id or only_one(path, ROUTER))


def ring_of_node(folder: str, node_id: str) -> KeyRing | None:
    """Return the ring of that node or, without an id, of the one node whose secret is here; None without a folder."""
    if not folder:
        return None
    path = Path(folder).expanduser()
    return KeyRing(path, NODE, node_id or only_one(path, NODE))


def only_one(folder: Path, kind: str) -> str:
    """Return the name of the one router or node whose secret is in a folder. Raise ConfigError for none or several."""
    require_folder(folder)
    names = [entry.name for entry in read_allowed(folder).of_kind(kind)]
    here = [name for name in names_with_secret(folder) if name in names]
    if len(here) != 1:
        raise ConfigError(
            f"--keys {folder} holds {len(here)} {kind}s' secrets ({', '.join(here)}): choose with --{kind}-id"
        )
    return here[0]
