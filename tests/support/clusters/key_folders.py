"""Keys folders for tests: a cluster's allowed list, and the secrets of those who belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.wire.keys.key_files import (
    ALLOWED,
    NODE,
    ROUTER,
    AllowedKeys,
    KeyEntry,
    KeyPair,
    make_folder,
    new_pair,
    read_allowed,
    write_pair,
    write_private,
)
from shared.wire.keys.keyring import KeyRing


def make_keys(folder: Path, nodes: Sequence[str] = ("p", "d"), routers: Sequence[str] = ("router",)) -> Path:
    make_folder(folder)
    entries = []
    for kind, name in [*((ROUTER, name) for name in routers), *((NODE, name) for name in nodes)]:
        pair = new_pair()
        write_pair(folder, name, pair)
        entries.append(KeyEntry(kind, name, pair.public))
    write_private(folder / ALLOWED, AllowedKeys(tuple(entries)).text)
    return folder


def edit_allowed(folder: Path, entries: Sequence[KeyEntry]) -> None:
    write_private(folder / ALLOWED, AllowedKeys(tuple(entries)).text)


def forged(folder: Path, kind: str, name: str, into: Path, pair: KeyPair | None = None) -> KeyRing:
    """The ring of somebody who has the cluster's list, and another key (one of his own making) under that name."""
    make_folder(into)
    pair = pair or new_pair()
    write_pair(into, name, pair)
    kept = [entry for entry in read_allowed(folder).entries if entry.name != name]
    edit_allowed(into, [*kept, KeyEntry(kind, name, pair.public)])
    return KeyRing(into, kind, name)


def write_key(path: Path, key: str) -> None:
    """A clients' or operators' key file, which routers take from its owner alone."""
    path.touch(mode=0o600)
    path.write_text(key)
