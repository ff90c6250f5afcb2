"""Caches a function's newest result, for example a batch's sampling parameters until a row joins or leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Source = TypeVar("Source")
Made = TypeVar("Made")


class Latest(Generic[Source, Made]):
    """Arguments are compared by identity, so an argument must not change."""

    def __init__(self, make: Callable[[Source], Made]) -> None:
        self._make = make
        self._newest: tuple[Source, Made] | None = None

    def __call__(self, source: Source) -> Made:
        newest = self._newest
        if newest is None or newest[0] is not source:
            newest = self._newest = source, self._make(source)
        return newest[1]
