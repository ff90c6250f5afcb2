"""Replaces the texts of a recorded request by made-up words of the same lengths. Keeps what belongs to the protocol.

A text keeps its white space, punctuation and tags. The words depend only on their lengths and places, so a request that
is replaced twice stays as it is; a test finds a text that was not replaced by this.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

SOUNDS = "balomerifadunosivetukaponeligasurodimevazutolepinagoke"
# The values of these keys are words of the protocol, names and patterns, or say nothing.
PROTOCOL = frozenset(
    {
        *("type", "role", "name", "model", "enum", "const", "required", "pattern", "format", "default", "$schema"),
        *("$ref", "tool_choice", "effort", "keep", "display", "summary", "include", "status", "ttl", "verbosity"),
        *("id", "call_id", "tool_use_id", "prompt_cache_key", "user_id", "syntax"),
    }
)
METADATA = "client_metadata"  # Codex's: only ids, and JSON with ids
BILLING = "x-anthropic-billing-header:"
# A server may look for these.
TAGS = "system-reminder|total_tokens|environment_context|cwd|shell|skills_instructions|permissions instructions"
WORD = re.compile(rf"(</?(?:{TAGS})>)|([^\W\d_]+)|(\d)")
IDS = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{12,})(?![0-9a-f])")


def replaced(value: Any, own: Collection[str], key: str = "") -> Any:
    """Return the value with other texts. `own`: texts of ours, which stay."""
    if isinstance(value, dict):
        same = key == METADATA
        return {name: replaced(part, own, "id" if same else name) for name, part in value.items()}
    if isinstance(value, list):
        return [replaced(part, own, key) for part in value]
    if not isinstance(value, str) or value in own:
        return value
    return without_ids(value) if key in PROTOCOL or value.startswith(BILLING) else text_of_words(value)


def without_ids(text: str) -> str:
    """Replace the digits of random ids by zeros."""
    return IDS.sub(lambda found: re.sub(r"[0-9a-f]", "0", found[0]), text)


def text_of_words(text: str) -> str:
    place = 0

    def other(found: re.Match[str]) -> str:
        nonlocal place
        tag, word, _ = found.groups()
        if tag:
            return tag
        place += 1
        return word_like(word, place) if word else "0"

    return WORD.sub(other, text)


def word_like(word: str, place: int) -> str:
    """Return a made-up word of this length: consonants and vowels in turn, capitals where the word has them."""
    start = 2 * (place * 7 % (len(SOUNDS) // 2))
    letters = (SOUNDS[(start + i) % len(SOUNDS)] for i in range(len(word)))
    return "".join(made.upper() if letter.isupper() else made for made, letter in zip(letters, word, strict=True))
