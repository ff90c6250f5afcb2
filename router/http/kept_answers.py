"""Keep whole answers by Idempotency-Key, so that a repeated request gets the first answer.

first request --> computed to its end, even if the client hangs up --> kept for KEPT_S
same again    --> waits for the first answer                          another body --> 422
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from router.http.errors import KeyReused
from shared.core.errors import InvalidRequest, Overloaded

KEPT_S = 600.0
MAX_ENTRIES = 1024
MAX_BYTES = 64 << 20
MAX_KEY_CHARS = 255
REPLAYED = b"idempotent-replayed"
Make = Callable[[], Coroutine[Any, Any, bytes]]
Name = tuple[bytes, str]  # (digest of the API keys, the client's Idempotency-Key)


@dataclass(eq=False, slots=True)
class Entry:
    """`num_bytes` and `ends_at` are set once the answer is kept."""

    digest: bytes
    task: asyncio.Task[bytes]
    num_bytes: int = 0
    ends_at: float = float("inf")


class KeptAnswers:
    """Owned by the event loop. A failure reaches every waiting request and is not kept."""

    def __init__(
        self, clock: Callable[[], float], *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._clock = clock
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: dict[Name, Entry] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def answer(self, name: Name, digest: bytes, make: Make) -> tuple[asyncio.Future[bytes], bool]:
        """Return the future answer, and whether an earlier request began it. Raise KeyReused for another body.

        `make` is called before this method returns, or never."""
        self._forget_old()
        entry = self._entries.get(name)
        is_again = entry is not None
        if entry is None:
            entry = self._begin(name, digest, make)
        elif entry.digest != digest:
            raise KeyReused("this Idempotency-Key was sent with another request in the last ten minutes")
        return asyncio.shield(entry.task), is_again

    def _begin(self, name: Name, digest: bytes, make: Make) -> Entry:
        while len(self._entries) >= self._max_entries:
            if not self._drop_oldest():
                raise Overloaded("too many requests with an Idempotency-Key are open; try again")

        entry = self._entries[name] = Entry(digest, asyncio.create_task(make()))
        entry.task.add_done_callback(lambda task: self._ended(name, entry))
        return entry

    def _ended(self, name: Name, entry: Entry) -> None:
        del self._entries[name]
        has_failed = entry.task.cancelled() or entry.task.exception() is not None
        if has_failed or len(entry.task.result()) > self._max_bytes:
            return
        self._entries[name] = entry  # inserted again, so that the oldest answers stay first
        entry.num_bytes, entry.ends_at = len(entry.task.result()), self._clock() + KEPT_S
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()

    def _forget_old(self) -> None:
        now = self._clock()
        for name in [name for name, entry in self._entries.items() if entry.ends_at <= now]:
            self._drop(name)

    def _drop_oldest(self) -> bool:
        name = next((name for name, entry in self._entries.items() if entry.ends_at < float("inf")), None)
        if name is not None:
            self._drop(name)
        return name is not None

    def _drop(self, name: Name) -> None:
        self.num_bytes -= self._entries.pop(name).num_bytes


def name_of_request(api_keys: tuple[str, ...], given: str) -> Name:
    """Return the name under which an answer is kept; no other API key leads to this name. Raise InvalidRequest for a
    bad length."""
    if not 1 <= len(given) <= MAX_KEY_CHARS:
        raise InvalidRequest(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters")
    return blake2b("\n".join(api_keys).encode(errors="replace"), digest_size=16).digest(), given
