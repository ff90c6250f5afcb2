"""How deep a body's JSON goes, and of how many lists and objects it is made, before anything is built of it: a parser
holds Python's lock while it builds, and every other stream waits."""

from __future__ import annotations

import re
from itertools import accumulate

from router.api.check_thread import too_deep
from shared.core.errors import InvalidRequest

MOST_CONTAINERS = 50_000
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # an end that lacks is no reason to look again
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_shape(raw: bytes, max_depth: int) -> None:
    """Raise InvalidRequest. Most bodies have too few brackets to be looked at closely. What is no JSON may be measured
    wrongly: the parser refuses it."""
    if raw.count(b"[") + raw.count(b"{") <= max_depth:
        return
    brackets = _STRING.sub(b"", raw).translate(None, _NO_BRACKETS)
    if len(brackets) > 2 * MOST_CONTAINERS:
        raise InvalidRequest(f"the request body holds more than {MOST_CONTAINERS} lists and objects")
    if max(accumulate(_STEPS[one] for one in brackets), default=0) > max_depth:
        raise too_deep()
