"""Scan growing text: pause at its end and continue later.

    text    ....done....|mark ... at ... end so far
                         rewind()  ^ the next character

A scanner is a generator that yields when it needs more text. Its result does not depend on where the text
is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
SPACE = " \t\r\n"
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
MAX_NAME_CHARS = 128
MAX_HELD_SPACE = 64  # limit on white space that is held back because a call may follow
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class NotACall(Exception):
    """The text began like a call, but is not a call."""


class Source:
    """`whole_marks`: marks that are one token, so that the text never ends within them.

    `is_cut`: the answer was cut off, perhaps within a mark or a call's beginning. This rest is dropped, because it is
    neither text nor a call. `met_end`: whether a scanner wanted more text than there is since the last `mark`."""

    __slots__ = ("_mark", "at", "has_ended", "is_cut", "met_end", "text", "whole_marks")

    def __init__(self, whole_marks: Collection[str] = ()) -> None:
        self.text = ""
        self.at = 0
        self.has_ended = False
        self.is_cut = False
        self.met_end = False
        self.whole_marks = whole_marks
        self._mark: int | None = None

    def feed(self, text: str) -> None:
        done = self.at if self._mark is None else self._mark
        self.text = self.text[done:] + text
        self.at -= done
        self._mark = None if self._mark is None else 0

    def mark(self) -> None:
        self._mark = self.at
        self.met_end = False

    def rewind(self) -> None:
        if self._mark is not None:
            self.at, self._mark = self._mark, None
        if self.is_cut and self.met_end and not self.text[self.at :].isspace():
            self.at = len(self.text)

    def commit(self) -> None:
        """Text before `at` is not read again."""
        self._mark = None

    def take_text(self, end: int) -> str:
        taken = self.text[self.at : end]
        self.at = end
        return taken


def peek(source: Source) -> Reading[str]:
    """Return "" at the end of the text."""
    while source.at >= len(source.text):
        if source.has_ended:
            source.met_end = True
            return ""
        yield
    return source.text[source.at]


def found(source: Source, literal: str) -> Reading[bool]:
    """Move past `literal`. Return False if other text follows."""
    for index, char in enumerate(literal):
        while source.at + index >= len(source.text):
            if source.has_ended:
                source.met_end |= not index or literal not in source.whole_marks
                return False
            yield
        if source.text[source.at + index] != char:
            return False
    source.at += len(literal)
    return True


def expect(source: Source, literal: str) -> Reading[None]:
    """Raise NotACall if other text follows."""
    if not (yield from found(source, literal)):
        raise NotACall


def stands_here(source: Source, marks: Collection[str]) -> Reading[bool]:
    """Whether one of the marks follows. The position does not change."""
    for mark in marks:
        if (yield from found(source, mark)):
            source.at -= len(mark)
            return True
    return False


def tried(source: Source, reading: Reading[None]) -> Reading[bool]:
    """Run a scanner. If it raises NotACall, go back to where it began, and return False."""
    source.mark()
    try:
        yield from reading
    except NotACall:
        source.rewind()
        return False
    return True


def skip_space(source: Source) -> Reading[None]:
    """Raise NotACall for more white space than may be held back."""
    num = 0
    while (char := (yield from peek(source))) and char in SPACE:
        num += 1
        if num > MAX_HELD_SPACE:
            raise NotACall
        source.at += 1


def skip_any_space(source: Source) -> Reading[None]:
    """Move past white space inside a call, where nothing is held back."""
    while (char := (yield from peek(source))) and char in SPACE:
        source.at += 1


def take_run(source: Source, chars: Container[str], limit: int) -> Reading[str]:
    run = ""
    while len(run) < limit and (char := (yield from peek(source))) and char in chars:
        run += char
        source.at += 1
    return run


def take_name(source: Source, names: Collection[str]) -> Reading[str]:
    """Return the one of `names` that stands here. Raise NotACall for another run of characters."""
    name = yield from take_run(source, NAME_CHARS, MAX_NAME_CHARS)
    if name in names:
        return name
    if not any(known.startswith(name) for known in names):
        source.met_end = False  # more text would not make it a call
    raise NotACall


def copy_until(
    source: Source, marks: Sequence[str], show: Callable[[str], None], *, shows_half_mark: bool = True
) -> Reading[str]:
    """Show text up to the first mark. Move past this mark and return it; return "" at the text's end.

    `shows_half_mark`: whether to show a mark's beginning if the text ends there and was not cut off.
    """
    while True:
        first = _first_mark(source, marks) if marks else None
        if first is not None:
            show(source.take_text(first[0]))
            source.at += len(first[1])
            return first[1]
        held = _num_held(source, marks, shows_half_mark)
        show(source.take_text(len(source.text) - held))
        if source.has_ended:
            source.at = len(source.text)
            return ""
        yield


def copy_json(source: Source, show: Callable[[str], None]) -> Reading[bool]:
    """Show the next JSON object or list, and check only its brackets. Return whether the value is complete."""
    depth = 0
    is_in_string = False
    while (yield from peek(source)):
        match = (_INSIDE if is_in_string else _OUTSIDE).search(source.text, source.at)
        show(source.take_text(len(source.text) if match is None else match.end()))
        if match is None:
            continue
        if match[0] == '"':
            is_in_string = not is_in_string
        elif match[0] == "\\":
            char = yield from peek(source)
            show(source.take_text(source.at + len(char)))
        elif match[0] in "{[":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return True
    return False


def nowhere(text: str) -> None:
    """Show nothing."""


def _first_mark(source: Source, marks: Sequence[str]) -> tuple[int, str] | None:
    """Return (start, mark) of the first mark. If several begin there, return the longest."""
    starts = ((source.text.find(mark, source.at), mark) for mark in marks)
    return min(((start, mark) for start, mark in starts if start >= 0), key=_place, default=None)


def _place(start_and_mark: tuple[int, str]) -> tuple[int, int]:
    return start_and_mark[0], -len(start_and_mark[1])


def _num_held(source: Source, marks: Sequence[str], shows_half_mark: bool) -> int:
    if source.is_cut:
        marks = [mark for mark in marks if mark not in source.whole_marks]
    elif source.has_ended and shows_half_mark:
        return 0
    return _possible_prefix(source, marks)


def _possible_prefix(source: Source, marks: Sequence[str]) -> int:
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(source.text) - source.at), 0, -1):
        if any(mark.startswith(source.text[-length:]) for mark in marks):
            return length
    return 0
