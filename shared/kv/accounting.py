"""Report all of a pool's accounting problems in one IntegrityError."""

from __future__ import annotations

from collections.abc import Sequence

from shared.core.errors import IntegrityError

MAX_NAMED = 20


def raise_problems(pool: str, problems: Sequence[str]) -> None:
    if not problems:
        return
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    raise IntegrityError(f"{pool}: " + "; ".join(problems[:MAX_NAMED]) + more)
