"""`baton keys tenant`: make a tenant's key, print it once, and write its hash into the router's keys file."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from router.tenants.keys_file import MAX_FILE_BYTES, NAME, bare_key, hash_of, parse_keys, parse_table
from shared.core.errors import ConfigError
from shared.wire.key_files import write_private
from shared.wire.private_file import read_private

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


def add_tenant(file: Path, name: str, requests_per_minute: int, tokens_per_minute: int, priority: int) -> None:
    """Add a tenant, or a known tenant's new key. Raise ConfigError for an unusable file."""
    if not re.fullmatch(NAME, name):
        raise ConfigError(f"{name!r} can't name a tenant: use letters, digits, '_' and '-', at most 64")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    text = read_private(file, MAX_FILE_BYTES) if file.exists() else HEAD.format(secret=secrets.token_urlsafe(KEY_BYTES))
    if file.exists() and bare_key(text) is not None:
        raise ConfigError(f"{file} holds one bare key: name a new file, and point --api-key-file at it")
    if name in ([] if not file.exists() else parse_table(text).tenants):
        text = with_key(text, name, hash_of(key), file)
    else:
        table = f'\n[tenants.{name}]\nkeys = ["{hash_of(key)}"]\n'
        limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
        limits["priority"] = priority
        text = text.rstrip("\n") + "\n" + table + "".join(f"{it} = {value}\n" for it, value in limits.items() if value)
    parse_keys(text)
    write_private(file, text)
    print(f"{name}'s key, which is stored nowhere: {key}")
    print(f"Its hash is in {file}: routers with --api-key-file {file} take it within a second.")


def with_key(text: str, name: str, hashed: str, file: Path) -> str:
    found = re.search(rf"^\[tenants\.{name}\][^\[]*?^keys *= *\[", text, re.MULTILINE)
    if found is None:
        raise ConfigError(f'{file}: no line `keys = [` below [tenants.{name}]; add "{hashed}" by hand')
    return f'{text[: found.end()]}"{hashed}", {text[found.end() :]}'
