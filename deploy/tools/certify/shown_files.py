"""Read certificates, and the ids shown with them, from answers as clients save them.

    a choice of an answer     {"choices": [{"certificate": {...}, "token_ids": [...], ...}], ...}
    events of a stream        data: {...}, one per line; a choice's token ids are put together
    a bare certificate        {"record": ..., "salt": ..., "prompt_token_ids": [...], "token_ids": [...]}

A file holds one of these, or one per line, and is read as far as its reader asks. A choice ends with its certificate
or finish reason: what comes later is another copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from router.certify.record import NO_RECORD, ShownAnswer
from shared.core.errors import ConfigError

EVENT, LAST_EVENT = b"data:", b"[DONE]"
OTHER_LINES = (b":", b"id:", b"event:", b"retry:")
BEGINNINGS = (b"{", b"[")  # of a document that is indented
MANY_LINES = "--log takes one answer or event per line, not an indented document; name one answer's file without --log"
KEPT_ANSWERS = 100  # whose prompt a choice may have that begins when all others have ended


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
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None

    @property
    def is_last(self) -> bool:
        return self.certificate is not None or self.finish_reason is not None


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
    """`choices`: the ones under way. `ended`: the indices of the others."""

    prompt_token_ids: list[int] | None = None
    choices: dict[int, SavedChoice] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def take_object(self, said: SavedObject) -> Iterator[ShownAnswer]:
        """Yield the choices that end with it."""
        self.prompt_token_ids = said.prompt_token_ids or self.prompt_token_ids
        for piece in said.choices:
            self.choices.setdefault(piece.index, SavedChoice()).take_piece(piece)
            if piece.is_last:
                self.ended.add(piece.index)
                yield self.choices.pop(piece.index).shown_after(self.prompt_token_ids)

    def is_over_before(self, said: SavedObject) -> bool:
        """Return whether the object is of another copy of this answer."""
        return any(piece.index in self.ended for piece in said.choices)

    def cut_choices(self) -> Iterator[ShownAnswer]:
        """Yield the choices whose end is not saved."""
        for choice in self.choices.values():
            yield choice.shown_after(self.prompt_token_ids)


def read_shown(path: Path, told: Callable[[str], None] | None = None) -> Iterator[ShownAnswer]:
    """Yield all certificates of the file, and NO_RECORD for choices without one. Raise ConfigError if it has none.

    `told`: gets the error of a line, which is then left out; without it, ConfigError is raised."""
    has_any = False
    try:
        with path.open("rb") as lines:
            for shown in shown_in(objects_of(lines, told), told):
                has_any |= shown.record != NO_RECORD
                yield shown
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} holds an answer or a certificate of another form: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} holds no answers in JSON: {error}") from None
    if not has_any:
        raise ConfigError(f'{path} holds no certificate; ask for answers with "certificate": true')


def shown_in(objects: Iterable[Any], told: Callable[[str], None] | None = None) -> Iterator[ShownAnswer]:
    """Yield each choice at its end. Only answers under way are held, and KEPT_ANSWERS others without their choices."""
    under_way: dict[str, SavedAnswer] = {}
    over: dict[str, SavedAnswer] = {}
    for one in objects:
        try:
            said = saved_object(one)
        except msgspec.ValidationError as error:
            if told is None:
                raise
            told(f"an answer of another form: {error}")
            continue
        if isinstance(said, ShownAnswer):
            yield said
        elif said is not None:
            name = said.id or ""
            answer = under_way.pop(name, None) or over.pop(name, None) or SavedAnswer()
            if answer.is_over_before(said):
                yield from answer.cut_choices()
                answer = SavedAnswer()
            yield from answer.take_object(said)
            if not name:
                yield from answer.cut_choices()
            elif answer.choices:
                under_way[name] = answer
            else:
                over[name] = answer
                if len(over) > KEPT_ANSWERS:
                    del over[next(iter(over))]
    for answer in under_way.values():
        yield from answer.cut_choices()


def saved_object(one: Any) -> ShownAnswer | SavedObject | None:
    """Return None for an object that is neither."""
    if isinstance(one, dict) and "record" in one:
        return msgspec.convert(one, ShownAnswer)
    if isinstance(one, dict) and isinstance(one.get("choices"), list):
        return msgspec.convert(one, SavedObject)
    return None


def objects_of(lines: Iterator[bytes], told: Callable[[str], None] | None = None) -> Iterator[Any]:
    """Yield the JSON values of lines, of a stream's events, or of one document.

    Raise ValueError for other texts, unless `told` gets the error of a line. Then a document of several lines is a
    ConfigError, because each of its lines would be an error."""
    is_first = True
    for number, whole in enumerate(lines, 1):
        line = whole.strip().removeprefix(EVENT).strip()
        if not line or line == LAST_EVENT or line.startswith(OTHER_LINES):
            continue
        try:
            yield json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            if told is not None and is_first and line in BEGINNINGS:
                raise ConfigError(MANY_LINES) from None
            if told is not None:
                told(f"line {number}: {error}")
            elif is_first:
                yield json.loads(b"".join((whole, *lines)).decode())
            else:
                raise ValueError(f"line {number}: {error}") from None
        is_first = False
