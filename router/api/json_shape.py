"""How deep a body's JSON goes, and of how many lists and objects it is made, before anything is built of it: a parser
holds Python's lock while it builds, and every other stream waits."""

from __future__ import annotations

import re

from router.api.check_thread import too_deep
from shared.core.errors import InvalidRequest

MOST_CONTAINERS = 50_000
OPENING = b"[{"
# a text, or brackets; a text whose end lacks goes to the end: looking for it again from each quote would take hours
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([\[\]{}]+)', re.DOTALL)


def check_shape(raw: bytes, max_depth: int) -> None:
    """Raise InvalidRequest. Most bodies have too few brackets to be looked at closely. What is no JSON may be measured
    wrongly: the parser refuses it."""
    if raw.count(b"[") + raw.count(b"{") <= max_depth:
        return
    depth = num_brackets = 0
    for part in _PART.finditer(raw):  # a loop of ours: other threads get their turn
        brackets = part[1] or b""
        num_brackets += len(brackets)
        if num_brackets > 2 * MOST_CONTAINERS:
            raise InvalidRequest(f"the request body holds more than {MOST_CONTAINERS} lists and objects")
        for one in brackets:
            depth += 1 if one in OPENING else -1
            if depth > max_depth:
                raise too_deep()
