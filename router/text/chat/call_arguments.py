"""Make an object of a past call's arguments, whatever the client sent: templates read objects only.

A model may write other JSON, or text that `max_tokens` cut. Clients send it back with each later request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

MAX_DEPTH = 64  # levels of objects and lists; templates write deeper ones by recursion, which Python limits
WHOLE = "arguments"  # the member that has the whole text, if this is not an object
_DECODER = json.JSONDecoder(strict=False)  # models write line ends into strings


def as_object(arguments: object) -> object:
    """Return a mapping that has all text of the arguments; the mapping itself if it is usable."""
    if isinstance(arguments, str):
        parsed = _parsed(arguments)
    else:
        parsed = json.dumps(arguments, ensure_ascii=False) if is_deeper(arguments, MAX_DEPTH) else arguments
    if isinstance(parsed, Mapping):
        return parsed
    return {} if parsed is None else {WHOLE: parsed}


def _parsed(text: str) -> object:
    """Return what the JSON text says, None for no text, and the text itself if it is not JSON."""
    text = text.strip()
    if not text:
        return None
    try:
        parsed = _DECODER.decode(text)
        if "\\ud" in text.lower():
            parsed = _without_half_characters(parsed)
    except (ValueError, RecursionError):
        return text
    return text if text.count("{") + text.count("[") > MAX_DEPTH and is_deeper(parsed, MAX_DEPTH) else parsed


def _without_half_characters(parsed: object) -> object:
    """Replace lone surrogates, which JSON can escape and no tokenizer can read."""
    text = json.dumps(parsed, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def is_deeper(value: object, depth: int) -> bool:
    """Whether objects and lists nest in more than `depth` levels. This is a loop, because Python limits recursion."""
    level = [value]
    for _ in range(depth):
        level = [inner for holder in level for inner in _inner_of(holder)]
        if not level:
            return False
    return True


def _inner_of(holder: object) -> list[object]:
    values = holder.values() if isinstance(holder, Mapping) else holder if isinstance(holder, list | tuple) else ()
    return [value for value in values if isinstance(value, Mapping | list | tuple)]
