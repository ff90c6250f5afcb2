"""Read and check the files of --api-key-file and --admin-key-file: one bare key, or a table of names with keys.

    one line       the key of a single tenant without limits, or of an operator with all rights
    otherwise      TOML: [tenants.NAME] or [admins.NAME] with `keys`, the hashes of its keys, and its limits or rights

`baton keys` makes a key of 32 random bytes, and its SHA-256, which does not reveal the key.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from router.tenants.tenant import ADMIN, EVERYBODY, RIGHTS, SEE, Tenant
from shared.core.errors import ConfigError
from shared.wire.keys.private_file import read_private

FLAG = "--api-key-file"
ADMIN_FLAG = "--admin-key-file"
HASH_PREFIX = "sha256:"
HASH = r"^sha256:[0-9a-f]{64}$"
NAME = r"^[A-Za-z0-9_-]{1,64}$"
MAX_FILE_BYTES = 4 << 20
MAX_KEY_CHARS = 4096
MAX_TENANTS = 10_000

Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Hashes = Annotated[list[Annotated[str, Meta(pattern=HASH)]], Meta(min_length=1, max_length=16)]
Names = Annotated[str, Meta(pattern=NAME)]
Table = TypeVar("Table")


class TenantEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several keys allow rotation. A limit of 0 means no limit."""

    keys: Hashes
    requests_per_minute: Count = 0
    tokens_per_minute: Count = 0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    adapters: Annotated[list[str], Meta(max_length=1024)] | None = None
    sees_cluster: bool = False


class KeysTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenants: Annotated[dict[Names, TenantEntry], Meta(max_length=MAX_TENANTS)]
    stream_secret: Annotated[str, Meta(max_length=MAX_KEY_CHARS)] = ""


class AdminEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may drain or change sees as well."""

    keys: Hashes
    rights: Annotated[list[Literal["see", "drain", "change"]], Meta(min_length=1)]


class AdminsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    admins: Annotated[dict[Names, AdminEntry], Meta(max_length=MAX_TENANTS)]


@dataclass(frozen=True, slots=True)
class KeysFile:
    """`by_digest`: tenants, or operators, by their keys' SHA-256; if empty, no request needs a key. `stream_secret`
    signs the ids of resumable streams; if "", each router draws its own secret. `is_table`: no bare key."""

    by_digest: Mapping[bytes, Tenant]
    stream_secret: str = ""
    is_table: bool = False


NO_KEYS = KeysFile({})


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def hash_of(key: str) -> str:
    return HASH_PREFIX + digest_of(key).hex()


def one_key(key: str, owner: Tenant = EVERYBODY) -> KeysFile:
    return KeysFile({digest_of(key): owner}, key)


def bare_key(text: str) -> str | None:
    """Return a one-line file's key; None for a table."""
    line = text.strip()
    return None if "\n" in line or line.startswith("[") else line


def parse_keys(text: str) -> KeysFile:
    """Raise ConfigError with the reason, but without the text, which may be secret."""
    if (key := only_key(text)) is not None:
        return one_key(key)
    table = parse_table(text, KeysTable)
    owners = [(tenant_of(name, entry), entry.keys) for name, entry in table.tenants.items()]
    return KeysFile(by_digest(owners, "tenant"), table.stream_secret, is_table=True)


def parse_admins(text: str) -> KeysFile:
    """Do the same for operators' keys."""
    if (key := only_key(text)) is not None:
        return one_key(key, ADMIN)
    admins = parse_table(text, AdminsTable).admins
    owners = [(admin_of(name, entry), entry.keys) for name, entry in admins.items()]
    return KeysFile(by_digest(owners, "admin"), is_table=True)


def only_key(text: str) -> str | None:
    """Return a file's bare key; None for a table."""
    key = bare_key(text)
    if key == "":
        raise ConfigError("the file is empty")
    if key is not None and (len(key) > MAX_KEY_CHARS or not key.isascii() or not key.isprintable()):
        raise ConfigError(f"the key is not one line of at most {MAX_KEY_CHARS} plain letters")
    return key


def by_digest(owners: list[tuple[Tenant, list[str]]], kind: str) -> dict[bytes, Tenant]:
    found: dict[bytes, Tenant] = {}
    for owner, keys in owners:
        for written in keys:
            digest = bytes.fromhex(written.removeprefix(HASH_PREFIX))
            if digest in found:
                raise ConfigError(f"{kind} {owner.name} has a key that is listed twice; a key belongs to one {kind}")
            found[digest] = owner
    if not found:
        raise ConfigError(f"there is no {kind} in it: everybody would be let in")
    return found


def parse_table(text: str, kind: type[Table]) -> Table:
    try:
        return msgspec.convert(tomllib.loads(text), kind)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"neither one key nor TOML: {position_of(error)}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def position_of(error: tomllib.TOMLDecodeError) -> str:
    """Return only the error's position, because the parser's message may quote the file's text."""
    found = re.search(r"\(at ([^()]*)\)", str(error))
    return found[1] if found else "it ends too early"


def tenant_of(name: str, entry: TenantEntry) -> Tenant:
    adapters = None if entry.adapters is None else frozenset(entry.adapters)
    limits = (entry.requests_per_minute, entry.tokens_per_minute)
    return Tenant(name, *limits, entry.priority, adapters, entry.sees_cluster)


def admin_of(name: str, entry: AdminEntry) -> Tenant:
    rights = tuple(right for right in RIGHTS if right == SEE or right in entry.rights)
    return Tenant(name, sees_cluster=True, rights=rights)


def read_text(path: str) -> str:
    return read_private(Path(path).expanduser(), MAX_FILE_BYTES)


def read_keys(path: str) -> KeysFile:
    """Raise ConfigError if the file is invalid, or if other users can read it. Without a path, requests need no key."""
    return read_file(path, FLAG, parse_keys)


def read_admins(path: str) -> KeysFile:
    """Do the same for operators' keys."""
    return read_file(path, ADMIN_FLAG, parse_admins)


def read_file(path: str, flag: str, parse: Callable[[str], KeysFile]) -> KeysFile:
    if not path:
        return NO_KEYS
    try:
        return parse(read_text(path))
    except ConfigError as error:
        raise ConfigError(f"{flag} {path}: {error.message}") from None
