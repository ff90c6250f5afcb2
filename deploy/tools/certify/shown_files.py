"""Read certificates, and the ids shown with them, from answers as clients save them.

    a choice of an answer     {"choices": [{"certificate": {...}, "token_ids": [...], ...}], ...}
    events of a stream        data: {...}, one per line; a choice's token ids are put together
    a bare certificate        {"record": ..., "salt": ..., "prompt_token_ids": [...], "token_ids": [...]}

A file holds one of these, or one per line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from router.certify.record import ShownAnswer
from shared.core.errors import ConfigError

EVENT, LAST_EVENT = "data:", "[DONE]"
OTHER_LINES = (":", "id:", "event:", "retry:")


@dataclass(slots=True)
class SavedChoice:
    """What the objects of one answer say of one choice."""

    certificate: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None

    def take_choice(self, choice: dict[str, Any], prompt_token_ids: list[int] | None) -> None:
        self.certificate = choice.get("certificate") or self.certificate
        self.prompt_token_ids = choice.get("prompt_token_ids") or prompt_token_ids or self.prompt_token_ids
        if (ids := choice.get("token_ids")) is not None:
            self.token_ids = [*(self.token_ids or []), *ids]

    def shown(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": self.prompt_token_ids, "token_ids": self.token_ids}
        return {**(self.certificate or {}), **ids}


@dataclass(slots=True)
class SavedAnswer:
    prompt_token_ids: list[int] | None = None
    choices: dict[int, SavedChoice] = field(default_factory=dict)


def read_shown(path: Path) -> list[ShownAnswer]:
    """Return all certificates of the file, in their order. Raise ConfigError if there is none."""
    try:
        objects = list(objects_of(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} holds no answers in JSON: {error}") from None
    answers: dict[str, SavedAnswer] = {}
    bare: list[dict[str, Any]] = []
    for one in objects:
        if isinstance(one, dict) and "record" in one:
            bare.append(one)
        elif isinstance(one, dict) and isinstance(one.get("choices"), list):
            take_answer(one, answers.setdefault(str(one.get("id")), SavedAnswer()))
    chosen = [choice for answer in answers.values() for choice in answer.choices.values()]
    found = [*bare, *(choice.shown() for choice in chosen if choice.certificate is not None)]
    if not found:
        raise ConfigError(f'{path} holds no certificate; ask for answers with "certificate": true')
    try:
        return [msgspec.convert(one, ShownAnswer) for one in found]
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} holds a certificate of another form: {error}") from None


def objects_of(text: str) -> Iterator[Any]:
    """Yield the JSON values of a document, of lines, or of a stream's events."""
    try:
        yield json.loads(text)
        return
    except ValueError:
        pass
    for line in map(str.strip, text.splitlines()):
        line = line.removeprefix(EVENT).strip()
        if line and line != LAST_EVENT and not line.startswith(OTHER_LINES):
            yield json.loads(line)


def take_answer(said: dict[str, Any], answer: SavedAnswer) -> None:
    answer.prompt_token_ids = said.get("prompt_token_ids") or answer.prompt_token_ids
    for choice in said["choices"]:
        saved = answer.choices.setdefault(int(choice.get("index", 0)), SavedChoice())
        saved.take_choice(choice, answer.prompt_token_ids)
