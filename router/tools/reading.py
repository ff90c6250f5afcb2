"""Scanners for text that is still growing: they stop where it ends so far, and go on later.

    text    ....done....|mark ... at ... end so far
                         rewind()  ^ the next character

A scanner is a generator that yields when it needs more. It decides by characters alone and never by where a piece of
text ended, so the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
SPACE = " \t\r\n"
MAX_HELD_SPACE = 64  # of a run that may still belong to a call
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class NotACall(Exception):
    """What began like a call goes on as text."""


class Source:
    """The text so far, the place of the next character, and a mark to go back to."""

    __slots__ = ("_mark", "at", "has_ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.has_ended = False
        self._mark: int | None = None

    def feed(self, text: str) -> None:
        done = self.at if self._mark is None else self._mark
        self.text = self.text[done:] + text
        self.at -= done
        self._mark = None if self._mark is None else 0

    def mark(self) -> None:
        self._mark = self.at

    def rewind(self) -> None:
        """Go back to the mark, which is used up."""
        if self._mark is not None:
            self.at, self._mark = self._mark, None

    def commit(self) -> None:
        """Forget the mark: what was read is read."""
        self._mark = None

    def take(self, end: int) -> str:
        """Return the text up to index `end`, and go there."""
        taken = self.text[self.at : end]
        self.at = end
        return taken


def peek(source: Source) -> Reading[str]:
    """Return the next character, or "" behind the last."""
    while source.at >= len(source.text):
        if source.has_ended:
            return ""
        yield
    return source.text[source.at]


def found(source: Source, literal: str) -> Reading[bool]:
    """Return whether `literal` comes next, and if so go behind it."""
    for index, char in enumerate(literal):
        while source.at + index >= len(source.text):
            if source.has_ended:
                return False
            yield
        if source.text[source.at + index] != char:
            return False
    source.at += len(literal)
    return True


def expect(source: Source, literal: str) -> Reading[None]:
    """Go behind `literal`. Raise NotACall at the first other character."""
    if not (yield from found(source, literal)):
        raise NotACall


def skip_space(source: Source, limit: int = MAX_HELD_SPACE) -> Reading[None]:
    """Go behind white space. Raise NotACall where there is more than may be held back."""
    num = 0
    while (char := (yield from peek(source))) and char in SPACE:
        num += 1
        if num > limit:
            raise NotACall
        source.at += 1


def skip_any_space(source: Source) -> Reading[None]:
    """Go behind white space within a call that has begun: nothing is held back for it."""
    while (char := (yield from peek(source))) and char in SPACE:
        source.at += 1


def take_run(source: Source, chars: Container[str], limit: int) -> Reading[str]:
    """Return the longest run of such characters, at most `limit` of them."""
    run = ""
    while len(run) < limit and (char := (yield from peek(source))) and char in chars:
        run += char
        source.at += 1
    return run


def copy_until(
    source: Source, marks: Sequence[str], show: Callable[[str], None], *, shows_half_mark: bool = True
) -> Reading[str]:
    """Show all text up to the first mark, and return that mark, or "" at the end. The mark is read and not shown.

    `shows_half_mark`: where the text ends within what may be a mark, that is text.
    """
    while True:
        first = _first_mark(source, marks)
        if first is not None:
            show(source.take(first[0]))
            source.at += len(first[1])
            return first[1]
        held = 0 if source.has_ended and shows_half_mark else _possible_prefix(source, marks)
        show(source.take(len(source.text) - held))
        if source.has_ended:
            source.at = len(source.text)
            return ""
        yield


def copy_json(source: Source, show: Callable[[str], None]) -> Reading[bool]:
    """Show the JSON object or list that comes next, and return whether it is complete. Only brackets are checked."""
    depth = 0
    is_in_string = False
    while (yield from peek(source)):
        match = (_INSIDE if is_in_string else _OUTSIDE).search(source.text, source.at)
        show(source.take(len(source.text) if match is None else match.end()))
        if match is None:
            continue
        if match[0] == '"':
            is_in_string = not is_in_string
        elif match[0] == "\\":
            char = yield from peek(source)
            show(source.take(source.at + len(char)))
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
    """Return (start, mark) of the first mark; of two at the same place, the longer."""
    starts = ((source.text.find(mark, source.at), mark) for mark in marks)
    return min(((start, mark) for start, mark in starts if start >= 0), key=_place, default=None)


def _place(start_and_mark: tuple[int, str]) -> tuple[int, int]:
    return start_and_mark[0], -len(start_and_mark[1])


def _possible_prefix(source: Source, marks: Sequence[str]) -> int:
    """Return the length of the longest end of the text that begins a mark."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(source.text) - source.at), 0, -1):
        if any(mark.startswith(source.text[-length:]) for mark in marks):
            return length
    return 0
