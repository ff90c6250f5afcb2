"""How a client is told which of its fields had no effect, and what the metric calls them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from router.api.fields import FieldTable

IGNORED = b"x-baton-ignored-fields"
MAX_NAMES = 16
MAX_CHARS = 64  # of one name
MAX_BYTES = 1024  # of all: proxies take no long headers
SAFE = "[]._-"  # beside letters and digits


def names_in_header(names: Sequence[str]) -> bytes:
    """Return the first names, escaped and separated by commas; `...` when there are more."""
    shown = [quote(name[:MAX_CHARS], safe=SAFE, errors="replace") for name in names[:MAX_NAMES]]
    while len(",".join(shown)) > MAX_BYTES:
        shown.pop()
    return ",".join([*shown, *(["..."] if len(names) > len(shown) else [])]).encode("ascii")


def known_fields(tables: Iterable[FieldTable[Any]]) -> frozenset[str]:
    """The names that the metric may show: clients' own would be without end."""
    return frozenset(name for table in tables for name in table.ignored)
