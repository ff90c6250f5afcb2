"""Read certificates, and the ids shown with them, from answers as clients save them.

    a choice of an answer     {"choices": [{"certificate": {...}, "token_ids": [...], ...}], ...}
    events of a stream        data: {...}, one per line; a choice's token ids are put together
    a bare certificate        {"record": ..., "salt": ..., "prompt_token_ids": [...], "token_ids": [...]}

A file holds one of these, or one per line. A choice's certificate ends it: what comes later is another copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from router.certify.record import NO_RECORD, ShownAnswer
from shared.core.errors import ConfigError

EVENT, LAST_EVENT = "data:", "[DONE]"
OTHER_LINES = (":", "id:", "event:", "retry:")


class SavedMessage(msgspec.Struct, frozen=True):
    """A chat's message, or what a chunk adds to it."""

    content: str | None = None
    reasoning_content: Any = None
    tool_calls: Any = None

    @property
    def is_text(self) -> bool:
        """Whether its tokens spell its content and no more."""
        return not self.reasoning_content and not self.tool_calls


class SavedPiece(msgspec.Struct, frozen=True):
    """What one object says of one choice."""

    index: int = 0
    text: str | None = None
    message: SavedMessage | None = None
    delta: SavedMessage | None = None
    certificate: ShownAnswer | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class SavedObject(msgspec.Struct, frozen=True):
    """An answer, or a chunk of one."""

    choices: list[SavedPiece]
    id: str | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(slots=True)
class SavedChoice:
    certificate: ShownAnswer | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    text: str | None = None
    is_text: bool = True

    def take_piece(self, piece: SavedPiece) -> None:
        message = piece.message or piece.delta or SavedMessage(piece.text)
        self.is_text = self.is_text and message.is_text
        if message.content is not None:
            self.text = (self.text or "") + message.content
        self.certificate = piece.certificate or self.certificate
        self.prompt_token_ids = piece.prompt_token_ids or self.prompt_token_ids
        if piece.token_ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += piece.token_ids

    def shown_after(self, prompt_token_ids: list[int] | None) -> ShownAnswer:
        return msgspec.structs.replace(
            self.certificate or ShownAnswer(record=NO_RECORD),
            prompt_token_ids=self.prompt_token_ids or prompt_token_ids,
            token_ids=self.token_ids,
            text=self.text if self.is_text else None,
        )


@dataclass(slots=True)
class SavedAnswer:
    prompt_token_ids: list[int] | None = None
    choices: dict[int, SavedChoice] = field(default_factory=dict)

    def take_object(self, said: SavedObject) -> None:
        self.prompt_token_ids = said.prompt_token_ids or self.prompt_token_ids
        for piece in said.choices:
            self.choices.setdefault(piece.index, SavedChoice()).take_piece(piece)

    def is_over_before(self, said: SavedObject) -> bool:
        """Return whether the object is of another copy of this answer."""
        ended = {index for index, choice in self.choices.items() if choice.certificate is not None}
        return any(piece.index in ended for piece in said.choices)

    def shown_choices(self) -> list[ShownAnswer]:
        return [choice.shown_after(self.prompt_token_ids) for choice in self.choices.values()]


def read_shown(path: Path, told: Callable[[str], None] | None = None) -> list[ShownAnswer]:
    """Return all certificates of the file, and NO_RECORD for choices without one. Raise ConfigError if it has none.

    `told`: gets the error of a line, which is then left out; without it, ConfigError is raised."""
    try:
        found = shown_in(objects_of(path.read_text("utf-8"), told), told)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} holds an answer or a certificate of another form: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} holds no answers in JSON: {error}") from None
    if all(one.record == NO_RECORD for one in found):
        raise ConfigError(f'{path} holds no certificate; ask for answers with "certificate": true')
    return found


def shown_in(objects: Iterator[Any], told: Callable[[str], None] | None = None) -> list[ShownAnswer]:
    bare: list[ShownAnswer] = []
    answers: list[SavedAnswer] = []
    open_answers: dict[str, SavedAnswer] = {}
    for one in objects:
        try:
            said = saved_object(one)
        except msgspec.ValidationError as error:
            if told is None:
                raise
            told(f"an answer of another form: {error}")
            continue
        if isinstance(said, ShownAnswer):
            bare.append(said)
        elif said is not None:
            answer = open_answers.get(said.id or "")
            if answer is None or not said.id or answer.is_over_before(said):
                answers.append(answer := SavedAnswer())
                open_answers[said.id or ""] = answer
            answer.take_object(said)
    return [*bare, *(one for answer in answers for one in answer.shown_choices())]


def saved_object(one: Any) -> ShownAnswer | SavedObject | None:
    """Return None for an object that is neither."""
    if isinstance(one, dict) and "record" in one:
        return msgspec.convert(one, ShownAnswer)
    if isinstance(one, dict) and isinstance(one.get("choices"), list):
        return msgspec.convert(one, SavedObject)
    return None


def objects_of(text: str, told: Callable[[str], None] | None = None) -> Iterator[Any]:
    """Yield the JSON values of a document, of lines, or of a stream's events. Raise ValueError for other texts, unless
    `told` gets the error of a line."""
    try:
        yield json.loads(text)
        return
    except ValueError:
        pass
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip().removeprefix(EVENT).strip()
        if line and line != LAST_EVENT and not line.startswith(OTHER_LINES):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                if told is None:
                    raise ValueError(f"line {number}: {error}") from None
                told(f"line {number}: {error}")
