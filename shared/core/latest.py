"""Remembers what was made of the newest argument.

A batch's sampling parameters stay one object from step to step, until a row joins or leaves: what a step makes of them
is made once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Source = TypeVar("Source")
Made = TypeVar("Made")


class Latest(Generic[Source, Made]):
    """A function that keeps what it made of its newest argument. Another object is another argument, however equal;
    nobody may change one that was given."""

    def __init__(self, make: Callable[[Source], Made]) -> None:
        self._make = make
        self._newest: tuple[Source, Made] | None = None

    def __call__(self, source: Source) -> Made:
        newest = self._newest
        if newest is None or newest[0] is not source:
            newest = self._newest = source, self._make(source)
        return newest[1]
