"""Reads and writes a keys folder: the allowed public keys, and one secret per name.

    DIR/allowed           one line per key: kind, name, public key; the same file on every machine
    DIR/NAME.secret       the secret key of NAME; on NAME's machine, and where keys are made
    DIR/NAME.next         the next secret key of NAME, during a rotation

The folder must have mode 0700, the files 0600: a key that others can read proves nothing.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from shared.core.errors import ConfigError
from shared.wire.keys.private_file import require_private

ROUTER, NODE = "router", "node"
KINDS = (ROUTER, NODE)
ALLOWED = "allowed"
SECRET, NEXT = ".secret", ".next"
KEY_BYTES = 32
MAX_FILE_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HEADER = (
    "# Who may take part in this cluster: kind, name, public key. No secrets here: every machine needs this file.\n"
)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A Curve25519 key pair, 32 bytes per key."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """During a rotation a name has two entries. The newer entry comes last."""

    kind: str
    name: str
    public: bytes

    @property
    def line(self) -> str:
        return f"{self.kind} {self.name} {self.public.hex()}\n"


class AllowedKeys:
    """The contents of an `allowed` file, immutable."""

    def __init__(self, entries: tuple[KeyEntry, ...] = ()) -> None:
        self.entries = entries
        self._by_key = {entry.public: entry for entry in entries}

    def of_key(self, public: bytes) -> KeyEntry | None:
        return self._by_key.get(public)

    def of_name(self, name: str) -> list[KeyEntry]:
        return [entry for entry in self.entries if entry.name == name]

    def of_kind(self, kind: str) -> list[KeyEntry]:
        return [entry for entry in self.entries if entry.kind == kind]

    @property
    def text(self) -> str:
        return HEADER + "".join(entry.line for entry in self.entries)


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public), z85.decode(secret))


def check_name(name: str) -> str:
    if not NAME.fullmatch(name) or name == ALLOWED:
        raise ConfigError(f"{name!r} can't name a key: use at most 64 letters, digits, '.', '_' and '-'")
    return name


def parse_allowed(text: str, where: object) -> AllowedKeys:
    """Raise ConfigError for a bad line, a repeated key, or a name of two kinds."""
    entries = [
        _parse_line(line.split(), f"{where}, line {number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    if len({entry.public for entry in entries}) < len(entries):
        raise ConfigError(f"{where}: the same key is listed twice; a key belongs to one name")
    if len({(entry.kind, entry.name) for entry in entries}) > len({entry.name for entry in entries}):
        raise ConfigError(f"{where}: a router and a node have the same name")
    return AllowedKeys(tuple(entries))


def _parse_line(words: list[str], where: str) -> KeyEntry:
    if len(words) != 3 or words[0] not in KINDS:
        raise ConfigError(f"{where}: the line must be `router NAME KEY` or `node NAME KEY`")
    return KeyEntry(words[0], check_name(words[1]), parse_key(words[2], where))


def parse_key(text: str, where: object) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{where}: a key must have {2 * KEY_BYTES} hexadecimal digits")
    return key


def read_allowed(folder: Path) -> AllowedKeys:
    return parse_allowed(read_private(folder / ALLOWED), folder / ALLOWED)


def read_pair(folder: Path, name: str, suffix: str = SECRET) -> KeyPair:
    path = folder / (check_name(name) + suffix)
    secret = parse_key(read_private(path).strip(), path)
    return KeyPair(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


def names_with_secret(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(SECRET) for path in folder.glob(f"*{SECRET}"))


def require_folder(folder: Path) -> None:
    try:
        info = os.stat(folder)
    except OSError as error:
        raise ConfigError(f"--keys {folder}: {error.strerror}; `baton keys create` makes one") from None
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"--keys {folder} is not a folder; `baton keys create` makes one")
    require_private(info, folder)


def read_private(path: Path) -> str:
    """Raise ConfigError if others may read the file or enter its folder."""
    require_folder(path.parent)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `baton keys --help` lists the files of this folder") from None
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        require_private(info, path)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is not a keys file")
        return file.read().decode("ascii", "replace")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    require_folder(folder)


def write_private(path: Path, text: str) -> None:
    """Replace the file atomically. Only this user can read the new file. Raise ConfigError if it can't be written."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def write_pair(folder: Path, name: str, pair: KeyPair, suffix: str = SECRET) -> None:
    write_private(folder / (check_name(name) + suffix), pair.secret.hex() + "\n")
