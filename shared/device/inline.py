"""Inline stream: a closure runs on the calling thread at launch. Nothing overlaps, so this backend is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from shared.device.events import Event, Ticket
from shared.device.stream import Closure, StreamEpochs, make_work, run_work

R = TypeVar("R")


class InlineStream:
    """Raises RuntimeError for a wait on an unfired event, because the wait could never end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._epochs = StreamEpochs()
        self._waits: list[Event] = []
        self._stopped = False

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        work = make_work(fn, fires, label, self.name, self._epochs.current)
        if self._stopped:
            work.skip("the stream was stopped")
            return work.ticket
        self._finish_waits()
        with torch.inference_mode():
            run_work(work, self._epochs)
        return work.ticket

    def wait(self, event: Event) -> None:
        # As on a device, a wait does not block the host. So the next launch checks that the event has fired.
        self._waits.append(event)

    def reset(self) -> None:
        self._epochs.open_next()

    def stop(self) -> None:
        self._stopped = True

    def _finish_waits(self) -> None:
        waits, self._waits = self._waits, []
        for event in waits:
            if not event.peek():
                raise RuntimeError(f"stream {self.name} waits on {event!r}, and nothing is left that could fire it")
