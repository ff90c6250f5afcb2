"""Check a pool's accounting."""

from __future__ import annotations

from typing import Protocol

from shared.kv.accounting import raise_problems


class Accounted(Protocol):
    def problems(self, *args: bool) -> list[str]: ...


def check_books(pool: Accounted, *expect_idle: bool) -> None:
    """Raise IntegrityError with what does not add up. `expect_idle`: caches may be asked whether nothing is held."""
    raise_problems(type(pool).__name__, pool.problems(*expect_idle))
