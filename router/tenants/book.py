"""Find tenants or operators by their keys, and read the keys file again when it changes.

file --read on a thread; changed?--> parsed there --> `now` is replaced; an invalid file changes nothing
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from router.tenants.keys_file import (
    ADMIN_FLAG,
    FLAG,
    NO_KEYS,
    KeysFile,
    digest_of,
    parse_admins,
    parse_keys,
    read_text,
)
from router.tenants.tenant import EVERYBODY, Tenant
from shared.core.errors import ConfigError
from shared.observe.log import Logger

FOLLOW_S = 0.4


class Tenants:
    """Owned by the event loop. `on_change` is called after each replacement."""

    def __init__(self, file: KeysFile = NO_KEYS) -> None:
        self.now = file
        self.on_change: Callable[[], None] = lambda: None

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.now.by_digest)

    def find(self, given: Sequence[str]) -> Tenant | None:
        """Return the tenant of the first known key, or None. Digests are compared, so timing doesn't show how close a
        guess is."""
        if not self.asks_for_keys:
            return EVERYBODY
        found = (self.now.by_digest.get(digest_of(key)) for key in given if key)
        return next((tenant for tenant in found if tenant is not None), None)

    def all(self) -> list[Tenant]:
        return list({tenant.name: tenant for tenant in self.now.by_digest.values()}.values()) or [EVERYBODY]

    def replace(self, file: KeysFile) -> None:
        self.now = file
        self.on_change()


class KeysFollower:
    """Reads the whole keys file every FOLLOW_S: the file's time would not show a second write in one clock tick.

    `flag`: which of the two files it is. `look` may block, so it runs on a thread."""

    def __init__(self, path: str, tenants: Tenants, log: Logger, flag: str = FLAG) -> None:
        self._path, self._tenants, self._log, self._flag = path, tenants, log, flag
        self._parse = parse_admins if flag == ADMIN_FLAG else parse_keys
        self._complaint = ""
        self._text: str | None = None  # None if unreadable

    async def follow(self) -> None:
        while self._path:
            await asyncio.sleep(FOLLOW_S)
            found = await asyncio.to_thread(self.look)
            if found is not None:
                self.take_keys(*found)

    def look(self) -> tuple[KeysFile, str] | None:
        """Return the file's contents; for an unusable file, the last contents and the reason; None if unchanged."""
        before, self._text = self._text, None
        try:
            self._text = read_text(self._path)
            return None if self._text == before else (self._checked(self._parse(self._text)), "")
        except ConfigError as error:
            return self._tenants.now, f"{self._flag} {self._path}: {error.message}"

    def _checked(self, found: KeysFile) -> KeysFile:
        """Any word is a key. In the place of a table, a slip of the hand would lock all owners out."""
        if self._tenants.now.is_table and not found.is_table:
            raise ConfigError("it was a table and is one bare key now; if that is meant, restart the router")
        return found

    def take_keys(self, found: KeysFile, complaint: str) -> None:
        if complaint and complaint != self._complaint:
            self._log.warning("keys stay as they were", why=complaint)
        self._complaint = complaint
        if found != self._tenants.now:
            self._tenants.replace(found)
            owners, keys = len(self._tenants.all()), len(found.by_digest)
            self._log.info("keys were read again", file=self._path, owners=owners, keys=keys)
