"""Feeds torch's own CUDA sanitizer with what a virtual GPU launches, waits for, allocates and frees. Its reports are
errors, at the launch that is not ordered behind an earlier one on the same address.

Like the original it compares addresses of tensors, so two views that overlap and begin at different places are two to
it; the deferring device finds those.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from tests.support.virtual_gpu.crossings import place

MAX_READS = 64  # that are kept of one address, one of each stream behind that


class RaceError(AssertionError):
    """Two launches use one address, one of them writes, and nothing orders them."""


class Races:
    """Called under the device's lock. `found`: all reports, one line each."""

    def __init__(self) -> None:
        from torch.cuda import _sanitizer  # makes a dispatch mode when it is imported, and enters none

        _sanitizer.traceback = LINES  # whole stacks of every access would fill the memory
        self._handler = _sanitizer.EventHandler()
        self._known: set[int] = set()  # events
        self.found: list[str] = []

    def made_stream(self, handle: int) -> None:
        self._handler._handle_stream_creation(handle)

    def allocated(self, address: int) -> None:
        self._handler._handle_memory_allocation(address)

    def freed(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self._handler._handle_memory_deallocation(address)

    def launched(self, handle: int, reads: set[int], writes: set[int], label: str) -> None:
        names: dict[int, list[str]] = {address: [] for address in reads | writes}
        errors = self._handler._handle_kernel_launch(handle, reads - writes, writes, set(), label, names)
        for address in reads - writes:
            self._forget_old_reads(address)
        if errors:
            lines = [f"{_said(e.current_access)} is not ordered behind {_said(e.previous_access)}" for e in errors]
            self.found += lines
            raise RaceError("\n".join(lines))

    def recorded(self, event: int, handle: int) -> None:
        if event not in self._known:
            self._known.add(event)
            self._handler._handle_event_creation(event)
        self._handler._handle_event_record(event, handle)

    def forgotten(self, event: int) -> None:
        if event in self._known:
            self._known.discard(event)
            self._handler._handle_event_deletion(event)

    def waited(self, event: int, handle: int) -> None:
        if event in self._known:
            self._handler._handle_event_wait(event, handle)

    def synchronized_event(self, event: int) -> None:
        if event in self._known:
            self._handler._handle_event_synchronization(event)

    def synchronized_stream(self, handle: int) -> None:
        self._handler._handle_stream_synchronization(handle)

    def synchronized(self) -> None:
        self._handler._handle_device_synchronization()

    def _forget_old_reads(self, address: int) -> None:
        info = self._handler.tensors_accessed.accesses[address]
        if len(info.reads) > MAX_READS:
            info.reads = list({access.stream: access for access in info.reads}.values())


def _said(access: Any) -> str:
    return f"{access.operator} {access.type} stream {access.stream} at {access.stack_trace[0]}"


def _extract(frames: object, lookup_lines: bool) -> list[str]:
    return [place()]


# What the sanitizer takes for the module `traceback`.
LINES = SimpleNamespace(StackSummary=SimpleNamespace(extract=_extract), walk_stack=lambda frame: None)
