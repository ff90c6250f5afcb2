"""The texts of a recorded request that a model must see, in the request's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.clients.words import BILLING

SAID = ("text", "output", "content")  # keys of an item or a block whose string is a text


def texts_of(body: dict[str, Any]) -> list[str]:
    """Return the texts of system prompt and conversation. A billing line is no text."""
    system = [body[key] for key in ("system", "instructions") if body.get(key)]
    found = texts_in([*system, *body.get("messages", ()), *body.get("input", ())])
    return [text for text in found if not text.startswith(BILLING)]


def texts_in(value: Any, key: str = "text") -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from texts_in(part, key)
    elif isinstance(value, dict):
        for name in SAID:
            yield from texts_in(value.get(name), name)
    elif isinstance(value, str):
        yield value


def first_not_in(prompt: str, body: dict[str, Any]) -> str | None:
    """Return the first text that the prompt lacks, or has too early."""
    at = 0
    for text in texts_of(body):
        place = prompt.find(text, at)
        if place < 0:
            return text
        at = place + len(text)
    return None
