"""Limit nesting, lists and objects in a body before parsing: the parser holds the GIL, and every stream waits."""

from __future__ import annotations

import re

from router.http.work_threads import too_deep
from shared.core.errors import InvalidRequest

MOST_CONTAINERS = 50_000
OPENING = b"[{"
# A string, or brackets. An unclosed string matches up to the body's end, because a new search from each of its quotes
# would take hours.
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([\[\]{}]+)', re.DOTALL)


def check_shape(raw: bytes, max_depth: int) -> None:
    """Raise InvalidRequest beyond a limit. Invalid JSON may be miscounted."""
    if raw.count(b"[") + raw.count(b"{") <= max_depth:
        return
    depth = num_brackets = 0
    for part in _PART.finditer(raw):  # a Python loop lets other threads run
        brackets = part[1] or b""
        num_brackets += len(brackets)
        if num_brackets > 2 * MOST_CONTAINERS:
            raise InvalidRequest(f"the request body holds more than {MOST_CONTAINERS} lists and objects")
        for one in brackets:
            depth += 1 if one in OPENING else -1
            if depth > max_depth:
                raise too_deep()
