"""Write a stream's events, with ids if the stream has any. `more` runs for every token."""

from __future__ import annotations

from collections.abc import Iterable

from router.api.answer.choice_text import Delta
from router.api.answer.choices import Step, add_delta
from router.api.answer.marks import Marks
from router.api.answer.stream_start import StreamStart
from router.api.answer.writer import Writer, ping_among_ids
from shared.observe.metrics import RequestMetrics


class MarkedEvents:
    """Owned by one Generation."""

    def __init__(self, writer: Writer, start: StreamStart | None, num_choices: int, metrics: RequestMetrics) -> None:
        """`start`: None if the events have no ids."""
        self._writer = writer
        self._marks = start.marks(num_choices) if start is not None else None
        self._metrics = metrics
        self._held: dict[int, Delta] = {}  # deltas of choices that wait until other choices catch up
        self.ping = writer.ping if start is None else ping_among_ids(writer.ping)
        self.is_behind = start is not None and start.seen is not None  # a resumed stream that catches up

    def more(self, steps: Iterable[Step]) -> bytes:
        """Raise ResumeMismatch if the reader saw other tokens."""
        marks = self._marks
        if marks is None:
            return b"".join([self._writer.more({index: delta}) for index, delta in steps])
        data = []
        for index, delta in steps:
            if marks.holds(index):
                add_delta(self._held, index, delta)
            else:
                data.append(self._shown(marks, index, delta))
            if self._held and not marks.is_behind:
                held, self._held = self._held, {}
                data += [self._shown(marks, *step) for step in held.items()]
        if self.is_behind and not marks.is_behind:
            self.is_behind = False
            self._metrics.continued(marks.num_recomputed)
        return b"".join(data)

    def _shown(self, marks: Marks, index: int, delta: Delta) -> bytes:
        self._writer.num_events = marks.num_events
        return marks.stamp(self._writer.more({index: delta}), index, delta)

    def marked(self, data: bytes) -> bytes:
        return data if self._marks is None else self._marks.stamp(data)

    def ending(self) -> bytes:
        """Raise ResumeMismatch if the reader saw more tokens."""
        if self._marks is not None:
            self._marks.finish()
            self._writer.num_events = self._marks.num_events
        return self.marked(self._writer.ending())
