"""A stream in the hand of a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.device.events import Event, Ticket
from shared.device.stream import Closure, StreamEpochs, Work, make_work, run_work


class HandDriven:
    """A stream that runs a closure when the test says so, and never before the events that it waits for."""

    def __init__(self) -> None:
        self.name, self.epoch = "transfer", 0
        self.open = True  # run as soon as the waits allow
        self.items: list[Work[Any] | Event] = []
        self.log: list[str] = []
        self._epochs = StreamEpochs()

    def launch(self, fn: Closure[Any], fires: Sequence[Event] = (), label: str = "") -> Ticket[Any]:
        work = make_work(fn, fires, label, self.name, 0)
        self.items.append(work)
        if self.open:
            self.run()
        return work.ticket

    def run(self) -> None:
        while self.items:
            item = self.items[0]
            if isinstance(item, Event):
                if not item.peek():
                    return
            else:
                self.log.append(item.label)
                run_work(item, self._epochs)
            self.items.pop(0)

    def wait(self, event: Event) -> None:
        self.items.append(event)

    def reset(self) -> None:
        self._epochs.open_next()

    def stop(self) -> None:
        self.items.clear()
