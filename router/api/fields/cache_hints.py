"""How long clients ask to keep a prompt cached: OpenAI's `prompt_cache_retention`, and Anthropic's `cache_control`.

All pages of a prompt are kept equally long. So of several marks in one prompt the longest counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from shared.core.errors import InvalidRequest

Retention = Literal["in_memory", "in-memory", "24h"]
RETENTION_S: Mapping[str | None, float] = {"24h": 24 * 3600.0}  # others: as long as there is room
TTL_S = {"5m": 300.0, "1h": 3600.0}
USUAL_TTL = "5m"
ABOUT_KEY = (
    "requests with the same key go to the same node if nodes are equal, and count together in measuring how soon "
    "conversations come back; the header X-Session-ID goes before it"
)
ABOUT_RETENTION = (
    "`24h`: the prompt stays cached after others, within the tenant's share; `in_memory`: as without it. Models with "
    "sliding windows ignore it"
)
ABOUT_CONTROL = (
    "the prompt stays cached after others for its `ttl` (`5m`, the default, or `1h`), within the tenant's share; "
    "tools, messages and their parts may have it, too, and the longest counts. Models with sliding windows ignore it"
)


def asked_s(marks: Iterable[tuple[str, object]]) -> float:
    """Return the longest time that (path, cache_control) pairs ask for. Raise InvalidRequest for an unknown `ttl`."""
    longest = 0.0
    for path, mark in marks:
        if not isinstance(mark, Mapping) or not mark:
            continue
        if mark.get("type", "ephemeral") != "ephemeral":
            raise InvalidRequest(f"{path}.type must be 'ephemeral'", param=f"{path}.type")
        ttl = mark.get("ttl") or USUAL_TTL
        if not isinstance(ttl, str) or ttl not in TTL_S:
            raise InvalidRequest(f"{path}.ttl must be '5m' or '1h'", param=f"{path}.ttl")
        longest = max(longest, TTL_S[ttl])
    return longest


def marks_of(parts: object, path: str) -> Iterable[tuple[str, object]]:
    """Yield the cache_control of each object in a list, with its path. Other values have none."""
    if isinstance(parts, list):
        for index, part in enumerate(parts):
            mark = part.get("cache_control") if isinstance(part, Mapping) else getattr(part, "cache_control", None)
            yield f"{path}[{index}].cache_control", mark


def marks_of_messages(messages: Iterable[object]) -> Iterable[tuple[str, object]]:
    """Yield the marks of messages and of their parts."""
    for index, message in enumerate(messages):
        path, content = f"messages[{index}]", getattr(message, "content", None)
        yield f"{path}.cache_control", getattr(message, "cache_control", None)
        yield from marks_of(content, f"{path}.content")
