"""W3C Trace Context: a request's `traceparent`, as its client sends it and as it goes on to nodes.

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01    version, trace id, span id of the caller, flags

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LENGTH = 55  # characters of version 00; later versions may have more, which begin with "-"
FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(given: Sequence[str]) -> str:
    """Return a header's first LENGTH characters; "" unless it was given once, in the standard's form."""
    if len(given) != 1:
        return ""
    text = given[0].strip(" \t")
    head, rest = text[:LENGTH], text[LENGTH:]
    is_longer = rest.startswith("-") and not head.startswith("00")
    return head if FORM.fullmatch(head) and (not rest or is_longer) else ""


def traced(traceparent: str) -> dict[str, str]:
    """Return the field of a log line, or none. A node's peer may have sent any text."""
    return {"trace_id": traceparent[3:35]} if traceparent and FORM.fullmatch(traceparent) else {}


def is_sampled(traceparent: str) -> bool:
    """Return whether the caller records its trace. Other texts than a traceparent are not sampled."""
    return bool(FORM.fullmatch(traceparent)) and bool(int(traceparent[-2:], 16) & 1)
