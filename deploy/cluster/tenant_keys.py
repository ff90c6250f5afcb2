"""`baton keys tenant`, `baton keys admin`: make a key, print it once, and write its hash into a router's file."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from router.tenants.keys_file import (
    ADMIN_FLAG,
    FLAG,
    MAX_FILE_BYTES,
    NAME,
    KeysFile,
    bare_key,
    hash_of,
    parse_admins,
    parse_keys,
)
from shared.core.errors import ConfigError
from shared.wire.keys.key_files import write_private
from shared.wire.keys.private_file import read_private

KEY_PREFIX = "baton-"  # makes a leaked key recognisable
KEY_BYTES = 32
HEAD = """\
# Who may use the API. The router reads this file again when it changes. `baton keys tenant` adds keys.
# A tenant has: keys, requests_per_minute and tokens_per_minute (0: no limit), priority (higher goes first), adapters
# (the ones that it may use; all if this line is missing), sees_cluster (whether it may see nodes and metrics).

# This secret signs the ids with which broken streams resume, and the counts of tenants' use that routers send each
# other. It must be the same at all routers.
stream_secret = "{secret}"
"""
ADMIN_HEAD = """\
# Who may use /admin. The router reads this file again when it changes. `baton keys admin` adds keys.
# An operator has: keys, rights (see: state and metrics; drain: drain and restart nodes; change: roles, adapters, ending
# answers; the last two include see).
"""


def add_tenant(file: Path, name: str, requests_per_minute: int, tokens_per_minute: int, priority: int) -> None:
    """Add a tenant, or a known tenant's new key. Raise ConfigError for an unusable file."""
    limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
    limits["priority"] = priority
    lines = "".join(f"{it} = {value}\n" for it, value in limits.items() if value)
    head = HEAD.format(secret=secrets.token_urlsafe(KEY_BYTES))
    add_key(KeyTable(FLAG, "tenants", head, parse_keys), file, name, lines)


def add_operator(file: Path, name: str, rights: list[str] | None) -> None:
    """Do the same with an operator. `rights`: of a new one; None: to see. Raise ConfigError."""
    table = KeyTable(ADMIN_FLAG, "admins", ADMIN_HEAD, parse_admins)
    if rights is not None and file.exists() and section_of(read_private(file, MAX_FILE_BYTES), table, name):
        raise ConfigError(f"{name} is in {file} already: change the line `rights` below [admins.{name}] by hand")
    add_key(table, file, name, f"rights = {json.dumps(rights or ['see'])}\n")


@dataclass(frozen=True, slots=True)
class KeyTable:
    """One of the two kinds of files. `section`: the table that holds the names."""

    flag: str
    section: str
    head: str
    parse: Callable[[str], KeysFile]


def add_key(table: KeyTable, file: Path, name: str, lines: str) -> None:
    """`lines`: what a new name gets besides its key."""
    if not re.fullmatch(NAME, name):
        raise ConfigError(f"{name!r} can't name a key's owner: use letters, digits, '_' and '-', at most 64")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    text = read_private(file, MAX_FILE_BYTES) if file.exists() else table.head
    if file.exists():
        if bare_key(text) is not None:
            raise ConfigError(f"{file} holds one bare key: name a new file, and point {table.flag} at it")
        try:
            known = {owner.name for owner in table.parse(text).by_digest.values()}
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.message}") from None
    else:
        known = set()
    if name in known:
        text = with_key(text, table, name, hash_of(key), file)
    else:
        text = f'{text.rstrip()}\n\n[{table.section}.{name}]\nkeys = ["{hash_of(key)}"]\n{lines}'
    table.parse(text)
    write_private(file, text)
    print(f"{name}'s key, which is stored nowhere: {key}")
    print(f"Its hash is in {file}: routers with {table.flag} {file} take it within a second.")


def section_of(text: str, table: KeyTable, name: str) -> re.Match[str] | None:
    return re.search(rf"^\[{table.section}\.{name}\][^\[]*?^keys *= *\[", text, re.MULTILINE)


def with_key(text: str, table: KeyTable, name: str, hashed: str, file: Path) -> str:
    found = section_of(text, table, name)
    if found is None:
        raise ConfigError(f'{file}: no line `keys = [` below [{table.section}.{name}]; add "{hashed}" by hand')
    return f'{text[: found.end()]}"{hashed}", {text[found.end() :]}'
