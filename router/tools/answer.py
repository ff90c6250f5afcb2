"""Read an answer as it grows: text in, typed deltas out.

thought   -> ReasoningText          at the beginning only
text      -> ContentText            held back only while it may begin a call
calls     -> CallBegun, CallArguments
rest      -> nothing: where an answer was cut off within a mark or a call's beginning
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from router.tools.declared import Tool
from router.tools.deltas import AnswerDelta, DeltaSink
from router.tools.formats import ToolFormat
from router.tools.reading import NotACall, Reading, Source, copy_until, expect, found, peek, skip_space
from router.tools.reasoning import Thought, split_thought


class AnswerReader:
    def __init__(
        self,
        row: ToolFormat | None,
        tools: Iterable[Tool] = (),
        thought: Thought | None = None,
        whole_marks: Collection[str] = (),
    ) -> None:
        """`row`: the format of calls; with None, no calls are read. A call of a tool outside `tools` counts as
        content. `whole_marks`: marks that are one token."""
        self._source = Source(whole_marks)
        self._sink = DeltaSink()
        self._row = row
        self._tools = {tool.name: tool for tool in tools}
        self._reading = self._answer(thought)
        next(self._reading, None)

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    @property
    def is_in_call(self) -> bool:
        """Whether the last call's arguments are incomplete. After `finish`, True means a cut-off call."""
        return self._sink.is_in_call

    def feed(self, text: str) -> list[AnswerDelta]:
        self._source.feed(text)
        next(self._reading, None)
        return self._sink.taken()

    def finish(self, *, is_cut: bool = False) -> list[AnswerDelta]:
        """Return the text that was held back. A cut-off call stays a call.

        `is_cut`: whether a limit ended the answer. Then the beginning of a mark or a call is dropped; else it is
        content, because the model ended it."""
        self._source.has_ended, self._source.is_cut = True, is_cut
        next(self._reading, None)
        return self._sink.taken()

    def _answer(self, thought: Thought | None) -> Reading[None]:
        if thought is not None:
            yield from split_thought(self._source, thought, self._sink)
        if self._row is None or not self._tools:
            yield from copy_until(self._source, (), self._sink.content)
        else:
            yield from _CallReader(self._row, self._tools, self._source, self._sink).all()


class _CallReader:
    def __init__(self, row: ToolFormat, tools: Mapping[str, Tool], source: Source, sink: DeltaSink) -> None:
        self._row = row
        self._tools = tools
        self._source = source
        self._sink = sink

    def all(self) -> Reading[None]:
        is_call = yield from self._try_group(may_be_bare=self._row.may_begin_bare)
        while True:
            while is_call:
                yield from self._drop_last_space()
                is_call = yield from self._try_group(may_be_bare=False)
            mark = yield from copy_until(self._source, self._row.begins, self._sink.content)
            if not mark:
                return
            self._source.at -= len(mark)
            is_call = yield from self._try_group(may_be_bare=False)
            if not is_call:
                self._sink.content(self._source.take_text(self._source.at + 1))

    def _try_group(self, *, may_be_bare: bool) -> Reading[bool]:
        self._source.mark()
        try:
            yield from skip_space(self._source)
            yield from self._group(may_be_bare)
        except NotACall:
            self._source.rewind()
            return False
        return True

    def _group(self, may_be_bare: bool) -> Reading[None]:
        row, source = self._row, self._source
        if not (yield from self._found_any(row.begins)) and not may_be_bare:
            raise NotACall
        yield from skip_space(source)
        yield from expect(source, row.opens)
        yield from skip_space(source)
        yield from row.shape.read(source, self._tools, self._sink)
        while row.separator and (yield from self._next_call()):
            pass
        if row.closes:
            yield from self._skip_mark((row.closes,))
        yield from self._skip_mark(row.ends)

    def _next_call(self) -> Reading[bool]:
        source = self._source
        source.mark()
        try:
            yield from skip_space(source)
            yield from expect(source, self._row.separator)
            yield from skip_space(source)
            yield from self._row.shape.read(source, self._tools, self._sink)
        except NotACall:
            source.rewind()
            return False
        return True

    def _skip_mark(self, marks: tuple[str, ...]) -> Reading[None]:
        self._source.mark()
        try:
            yield from skip_space(self._source)
            is_there = yield from self._found_any(marks)
        except NotACall:
            is_there = False
        if is_there:
            self._source.commit()
        else:
            self._source.rewind()

    def _drop_last_space(self) -> Reading[None]:
        self._source.mark()
        try:
            yield from skip_space(self._source)
        except NotACall:
            pass
        else:
            if not (yield from peek(self._source)):
                self._source.commit()
                return
        self._source.rewind()

    def _found_any(self, marks: tuple[str, ...]) -> Reading[bool]:
        for mark in marks:
            if (yield from found(self._source, mark)):
                return True
        return False
