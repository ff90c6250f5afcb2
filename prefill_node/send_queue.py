"""Describe pages that go to other nodes, in order, as far as the peers read them.

    add -> waits for room at its peer -> described on the transfer stream -> Ready, which the caller sends

A hand-off or a loan may end at any time: what waits then is dropped, and a result is not returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from prefill_node.unread import Unread
from shared.engine.transfer_jobs import TransferJobs
from shared.node.loop.context import NodeContext
from shared.transfer.interface import READY_BYTES, WHOLE, PageList, PageSender, PageSet, Part, part_bytes


@dataclass(slots=True, eq=False)
class Sending:
    """How pages of a hand-off or a loan travel. `untaken`: frame bytes of each Ready that the peer has not taken."""

    lease: int
    sender: PageSender
    num_describing: int = 0  # page sets that the transfer stream is describing
    untaken: deque[int] = field(default_factory=deque)

    def take_oldest(self) -> bool:
        """Drop the oldest Ready, which the peer has taken. Return False if there is none."""
        if not self.untaken:
            return False
        self.untaken.popleft()
        return True


class SentPages(Protocol):
    """A granted hand-off, or a loan."""

    @property
    def peer(self) -> str: ...

    @property
    def sending(self) -> Sending: ...


T = TypeVar("T", bound=SentPages)


@dataclass(frozen=True, slots=True, eq=False)
class QueuedPages(Generic[T]):
    """Pages that wait to be described. pages[0] is entry `first` of the request's page list."""

    sent: T
    first: int
    pages: PageList
    part: Part


@dataclass(frozen=True, slots=True)
class Described(Generic[T]):
    """`page_set`: None if the job failed with `error`."""

    sent: T
    first: int
    page_set: PageSet | None
    error: Exception | None


class SendQueue(Generic[T]):
    """`open`: the hand-offs or loans that have not ended, by the key that `key_of` returns."""

    def __init__(self, ctx: NodeContext, unread: Unread, open: Mapping[Any, T], key_of: Callable[[T], Any]) -> None:
        self._pool = ctx.core.pool
        self._unread = unread
        self._open = open
        self._key_of = key_of
        self._jobs: TransferJobs[tuple[T, int], PageSet] = TransferJobs(ctx.core.engine)
        self._waiting: deque[QueuedPages[T]] = deque()

    def __len__(self) -> int:
        """Return how many page sets wait for room."""
        return len(self._waiting)

    def add_pages(self, sent: T, first: int, pages: PageList, part: Part = WHOLE) -> None:
        """Queue pages, in sets that fit a Ready. `launch` starts to describe them. Entries of 0 are left out."""
        most = max(1, READY_BYTES // part_bytes(part, self._pool))
        pages = np.asarray(pages, np.int32)
        entries = np.flatnonzero(pages)
        for start in range(0, len(entries), most):
            own = entries[start : start + most]
            self._waiting.append(QueuedPages(sent, first + int(own[0]), pages[own], part))

    def launch(self) -> list[T]:
        """Start to describe waiting page sets, in order. Skip peers that must read earlier frames first. Return whose
        sets were launched."""
        entries, self._waiting = self._waiting, deque()
        # Peers without room. Their later page sets wait, or small sets could overtake a large one forever.
        full: set[str] = set()
        launched: list[T] = []
        for entry in entries:
            sent = entry.sent
            if not self._is_open(sent):
                continue
            is_inline = sent.sending.sender.is_inline
            num_bytes = len(entry.pages) * part_bytes(entry.part, self._pool) if is_inline else 0
            if sent.peer in full or not self._has_room(sent, num_bytes):
                full.add(sent.peer)
                self._waiting.append(entry)
                continue
            self._launch(entry, num_bytes)
            launched.append(sent)
        return launched

    def _is_open(self, sent: T) -> bool:
        return self._open.get(self._key_of(sent)) is sent

    def _has_room(self, sent: T, num_bytes: int) -> bool:
        others = self._open.values() if num_bytes else ()
        untaken = sum(sum(other.sending.untaken) for other in others if other.peer == sent.peer)
        return self._unread.has_room(sent.peer, sent.sending.sender, untaken, num_bytes)

    def _launch(self, entry: QueuedPages[T], num_bytes: int) -> None:
        sending = entry.sent.sending
        self._unread.begin(entry.sent.peer)
        if num_bytes:
            sending.untaken.append(num_bytes)
        sending.num_describing += 1
        job = partial(sending.sender.describe, entry.pages, entry.part)
        self._jobs.launch((entry.sent, entry.first), job, f"describe({entry.first})")

    def take_done(self) -> Iterator[Described[T]]:
        """Yield described page sets, except those of ended hand-offs or loans: their pages may have a new owner. Read
        all of them: then the peers' reading is counted."""
        for done in self._jobs.take_done():
            sent, first = done.tag
            sent.sending.num_describing -= 1
            self._unread.described(sent.peer, done.value)
            if self._is_open(sent):
                yield Described(sent, first, done.value, done.error)
        self._unread.take_read()
