"""Find tenants by their keys, and read the keys file again when it changes.

file --read on a thread; changed?--> parsed there --> `now` is replaced; an invalid file changes nothing
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from router.tenants.keys_file import FLAG, NO_KEYS, KeysFile, digest_of, one_key, parse_keys, read_text
from router.tenants.tenant import EVERYBODY, Tenant
from shared.core.errors import ConfigError
from shared.observe.log import Logger

FOLLOW_S = 0.4


class Tenants:
    """Owned by the event loop. `on_change` is called after each replacement."""

    def __init__(self, file: KeysFile = NO_KEYS) -> None:
        self.now = file
        self.on_change: Callable[[], None] = lambda: None

    @classmethod
    def with_key(cls, key: str) -> Tenants:
        """Return a book with only this key. With "", requests need no key."""
        return cls(one_key(key) if key else NO_KEYS)

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

    `look` may block, so it runs on a thread."""

    def __init__(self, path: str, tenants: Tenants, log: Logger) -> None:
        self._path, self._tenants, self._log = path, tenants, log
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
            return None if self._text == before else (parse_keys(self._text), "")
        except ConfigError as error:
            return self._tenants.now, f"{FLAG} {self._path}: {error.message}"

    def take_keys(self, found: KeysFile, complaint: str) -> None:
        if complaint and complaint != self._complaint:
            self._log.warning("tenants stay as they were", why=complaint)
        self._complaint = complaint
        if found != self._tenants.now:
            self._tenants.replace(found)
            self._log.info("tenants were read again", tenants=len(self._tenants.all()), keys=len(found.by_digest))
