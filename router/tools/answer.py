"""Read an answer as it grows: text in, typed deltas out.

thought   -> ReasoningText          at the beginning, or anywhere in formats where thoughts recur
text      -> ContentText            held back only while it may begin a call
calls     -> CallBegun, CallArguments; also inside a thought that the model forgot to close
rest      -> nothing: where an answer was cut off within a mark or a call's beginning
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from router.tools.calls.channels import ChannelReader
from router.tools.calls.deltas import AnswerDelta, DeltaSink
from router.tools.calls.format_row import ToolFormat
from router.tools.calls.json_calls import ARGUMENTS, JsonCalls
from router.tools.calls.reading import (
    MAX_HELD_SPACE,
    SPACE,
    NotACall,
    Reading,
    Source,
    copy_json,
    copy_until,
    expect,
    found,
    peek,
    skip_any_space,
    skip_space,
    tried,
)
from router.tools.reasoning import Thought, ThoughtTags
from router.tools.response_template import ResponseTemplate
from router.tools.schemas.declared import Tool
from router.tools.template_reader import TemplateReader


class AnswerReader:
    def __init__(
        self,
        row: ToolFormat | None,
        tools: Iterable[Tool] = (),
        thought: Thought | None = None,
        whole_marks: Collection[str] = (),
        *,
        is_lenient: bool = True,
        template: ResponseTemplate | None = None,
        opened: str = "",
    ) -> None:
        """`row`: the format of calls; with None, no calls are read. A call of a tool outside `tools` counts as
        content. `whole_marks`: marks that are one token. `is_lenient`: whether an answer that is one JSON object may be
        a call without its marks. `template`: the model's own description of its answers, which then counts instead of
        `row` and `thought`; `opened`: what the prompt holds of the answer."""
        self._source = Source(whole_marks)
        self._sink = DeltaSink()
        self._row = row
        self._tools = {tool.name: tool for tool in tools}
        self._is_lenient = is_lenient
        if template is not None:
            self._reading = TemplateReader(template, self._tools, self._sink, opened, whole_marks).read(self._source)
        else:
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
        if thought is not None and thought.tags.channels is not None:
            reader = ChannelReader(thought.tags.channels, self._tools, self._source, self._sink)
            yield from reader.read_messages(is_in_thought=thought.is_open)
        else:
            row = self._row if self._tools else None
            yield from _TagReader(row, self._tools, thought, self._source, self._sink).read_parts(
                is_lenient=self._is_lenient
            )


class _TagReader:
    """Reads answers whose thoughts and calls stand between marks."""

    def __init__(
        self,
        row: ToolFormat | None,
        tools: Mapping[str, Tool],
        thought: Thought | None,
        source: Source,
        sink: DeltaSink,
    ) -> None:
        self._row = row
        self._tools = tools
        self._thought = thought
        self._source = source
        self._sink = sink
        self._begins = row.begins if row is not None else ()
        tags = thought.tags if thought is not None else None
        self._openings = (tags.opening,) if tags is not None and tags.recurs else ()
        self._frames = (row.frames if row is not None else ()) + (tags.frames if tags is not None else ())

    def read_parts(self, *, is_lenient: bool) -> Reading[None]:
        thought = self._thought
        if thought is not None and (thought.is_open or (yield from _begins_with(self._source, thought.tags.opening))):
            yield from self._inside(thought.tags)
        elif thought is not None and (yield from _begins_with(self._source, thought.tags.closing)):
            yield from _drop_blank_lines(self._source)  # of a thought that the model did not even begin
        yield from self._drop_first_frame()
        is_call = yield from self._first_group(is_lenient)
        while True:
            while is_call:
                yield from self._drop_last_space()
                is_call = yield from self._try_group(may_be_bare=False)
            marks = (*self._begins, *self._openings, *self._frames)
            mark = yield from copy_until(self._source, marks, self._sink.content)
            if not mark:
                return
            if mark in self._openings and thought is not None:
                yield from self._inside(thought.tags)
            elif mark in self._begins:
                is_call = yield from self._call_at(mark, self._sink.content)

    def _drop_first_frame(self) -> Reading[None]:
        if self._row is not None and self._row.first_frame:
            yield from found(self._source, self._row.first_frame)

    def _first_group(self, is_lenient: bool) -> Reading[bool]:
        if self._row is None:
            return False
        if (yield from self._try_group(may_be_bare=self._row.may_begin_bare)):
            return True
        return is_lenient and (yield from tried(self._source, self._bare_object()))

    def _inside(self, tags: ThoughtTags) -> Reading[None]:
        """Read a thought, and blank lines behind it. Calls may stand in it, if the model forgot to close it."""
        source, held = self._source, ""
        yield from _drop_blank_lines(source)
        if (yield from found(source, tags.opening)):  # the model repeats the tag that the prompt ended with
            yield from _drop_blank_lines(source)

        def show(text: str) -> None:
            nonlocal held
            shown = (held + text).rstrip(SPACE)
            held = (held + text)[len(shown) :]
            self._sink.reasoning(shown)

        while mark := (yield from copy_until(source, (tags.closing, *self._begins), show)):
            if mark == tags.closing:
                yield from _drop_blank_lines(source)
                return
            if (yield from self._call_at(mark, show)):
                held = ""
                yield from self._drop_last_space()
                while (yield from self._try_group(may_be_bare=False)):
                    yield from self._drop_last_space()
        self._sink.reasoning(held)

    def _call_at(self, mark: str, show: Callable[[str], None]) -> Reading[bool]:
        """Read the group that `mark` begins, behind which the position is. Else show one character."""
        self._source.at -= len(mark)
        if (yield from self._try_group(may_be_bare=False)):
            return True
        show(self._source.take_text(self._source.at + 1))
        return False

    def _try_group(self, *, may_be_bare: bool) -> Reading[bool]:
        return (yield from tried(self._source, self._group(may_be_bare)))

    def _group(self, may_be_bare: bool) -> Reading[None]:
        row, source = self._row, self._source
        assert row is not None
        yield from skip_space(source)
        if not (yield from self._found_any(row.begins)) and not may_be_bare:
            raise NotACall
        yield from skip_space(source)
        yield from expect(source, row.opens)
        yield from skip_space(source)
        yield from row.shape.read(source, self._tools, self._sink)
        while row.separator is not None and (yield from tried(source, self._next_call(row.separator))):
            pass
        if row.closes:
            yield from self._skip_mark((row.closes,))
        yield from self._skip_mark(row.ends)

    def _next_call(self, separator: str) -> Reading[None]:
        assert self._row is not None
        yield from skip_space(self._source)
        yield from expect(self._source, separator)
        yield from skip_space(self._source)
        yield from self._row.shape.read(self._source, self._tools, self._sink)

    def _bare_object(self) -> Reading[None]:
        """Read an answer that is one JSON object, perhaps in a code fence, with a declared tool's name and arguments.

        Small models forget the tag."""
        source = self._source
        yield from skip_space(source)
        is_fenced = yield from found(source, "```")
        if is_fenced:
            yield from found(source, "json")
            yield from skip_space(source)
        name = yield from JsonCalls("arguments").read_name(source, self._tools)
        yield from skip_space(source)
        yield from expect(source, ",")
        yield from skip_space(source)
        yield from self._expect_arguments()
        source.commit()
        self._sink.begin_call(name)
        if (yield from copy_json(source, self._sink.arguments)):
            self._sink.end_call()
            yield from skip_any_space(source)
            yield from found(source, "}")
            yield from self._skip_mark(("```",) if is_fenced else ())

    def _expect_arguments(self) -> Reading[None]:
        """Move to the brace of the arguments."""
        source = self._source
        for key in sorted(ARGUMENTS, key=len, reverse=True):
            if (yield from found(source, f'"{key}"')):
                yield from skip_space(source)
                yield from expect(source, ":")
                yield from skip_space(source)
                if (yield from peek(source)) == "{":
                    return
                break
        raise NotACall

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


def _begins_with(source: Source, tag: str) -> Reading[bool]:
    """Move past a tag and white space before it. Return False without such a tag."""
    source.mark()
    num = 0
    while (char := (yield from peek(source))) and char in SPACE and num < MAX_HELD_SPACE:
        source.at += 1
        num += 1
    is_there = yield from found(source, tag)
    if is_there:
        source.commit()
    else:
        source.rewind()
    return is_there


def _drop_blank_lines(source: Source) -> Reading[None]:
    source.mark()
    while (char := (yield from peek(source))) and char in SPACE:
        source.at += 1
        if char == "\n":
            source.mark()
    source.rewind()
