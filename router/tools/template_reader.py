"""Read an answer by the model's response template: thoughts and content as they grow, calls when their region ends.

    prompt ... <|assistant|><think>\\n | so the town ... </think> It is <call>{...}</call>
               anchor       read first | the answer

A region of calls that can't be read, or that calls a tool outside the declared ones, is content as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from router.tools.calls.deltas import DeltaSink
from router.tools.calls.reading import Reading, Source
from router.tools.response_template import Mark, Match, Region, RegionKind, ResponseTemplate
from router.tools.schemas.declared import Tool
from router.tools.template_values import calls_of

MAX_MARK_CHARS = 1024  # of a pattern's match, and of the text held back for one
SLICE_CHARS = 256  # of new text that is searched at once
KEPT_CHARS = 64  # before the position, for patterns that look back
MAX_STILL = 4  # marks in a row that take no text


@dataclass(frozen=True, slots=True)
class _Found:
    region: Region
    match: Match
    opens: bool

    @property
    def place(self) -> tuple[int, int, bool]:
        """The first mark counts; of several there, the longest."""
        start, end = self.match.span()
        return start, start - end, not self.opens


class _Shown:
    """Shows a text without white space at its ends."""

    def __init__(self) -> None:
        self.held = ""
        self.has_begun = False
        self._drops_space = True

    def begin_region(self, join: str | None) -> None:
        if join is not None and self.has_begun:
            self.held, self._drops_space = join, True

    def add_text(self, text: str, show: Callable[[str], None], *, strips: bool) -> None:
        text = text.lstrip() if strips and self._drops_space else text
        if not text:
            return
        whole = self.held + text
        shown = whole.rstrip() if strips else whole
        self.held, self.has_begun, self._drops_space = whole[len(shown) :], True, False
        show(shown)


@dataclass(slots=True)
class _Open:
    """The region that the next text belongs to; None: text in no region."""

    region: Region | None
    is_inside: bool = False  # whether a mark opened the region
    captures: dict[str, object] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)  # of a region of calls
    written: list[str] = field(default_factory=list)  # the same with its marks, without the prompt's part


class TemplateReader:
    def __init__(
        self,
        template: ResponseTemplate,
        tools: Mapping[str, Tool],
        sink: DeltaSink,
        opened: str = "",
        whole_marks: Collection[str] = (),
    ) -> None:
        """`opened`: what the prompt holds of the answer. `whole_marks`: marks that are one token."""
        self._template = template
        self._tools = tools
        self._sink = DeltaSink()  # shows nothing of the prompt
        self._whole_marks = whole_marks
        self._text = ""
        self._at = 0
        self._own_at = 0  # where the answer's own text begins
        self._open = _Open(template.implicit)
        self._outside: list[str] | None = []  # text in no region, until one begins
        self._shown = {kind: _Shown() for kind in RegionKind}
        self._num_still = 0
        self._has_ended = False
        self._is_cut = False
        self._is_lost = False  # a pattern took too long: all other text is content
        self._read_more(opened)
        self._own_at, self._sink, self._open.written = len(self._text), sink, []
        for shown in self._shown.values():
            shown.held = ""
        self._outside = None if self._outside is None else []

    @property
    def is_thinking(self) -> bool:
        region = self._open.region
        return region is not None and region.kind is RegionKind.THINKING

    def read(self, source: Source) -> Reading[None]:
        while True:
            self._read_more(source.take_text(len(source.text)))
            if source.has_ended:
                self._finish(is_cut=source.is_cut)
                return
            yield

    def _read_more(self, text: str) -> None:
        for start in range(0, len(text), SLICE_CHARS):
            self._text += text[start : start + SLICE_CHARS]
            self._read_marks()

    def _finish(self, *, is_cut: bool) -> None:
        self._has_ended, self._is_cut = True, is_cut
        self._read_marks()
        self._leave(is_cut=is_cut)
        if self._outside:  # the answer has no region at all
            self._show_as_written("".join(self._outside).strip())

    def _read_marks(self) -> None:
        try:
            while not self._is_lost:
                found, end = self._next_mark()
                if found is None:
                    self._take(end)
                    break
                self._take(found.match.start())
                self._pass_mark(found)
                if self._num_still > MAX_STILL:
                    if self._at == len(self._text):
                        break
                    self._take(self._at + 1)
        except TimeoutError:
            self._is_lost = True
        if self._is_lost:
            region = self._open.region
            is_call = region is not None and region.kind is RegionKind.CALLS
            written = "".join(self._open.written) if is_call else ""
            self._show_as_written(written + self._own_text(len(self._text)))
            self._open.written, self._open.body, self._outside = [], [], None
            self._at = len(self._text)
        if self._has_ended:
            self._at = len(self._text)
        dropped = max(self._at - KEPT_CHARS, 0)
        self._text, self._at = self._text[dropped:], self._at - dropped
        self._own_at = max(self._own_at - dropped, 0)

    def _next_mark(self) -> tuple[_Found | None, int]:
        """Return the next mark, and where the text ends that belongs to the region for certain."""
        first: _Found | None = None
        end = len(self._text)
        for region, mark, opens in self._watched():
            match = self._match(mark)
            if not self._has_ended or (self._is_cut and not self._is_whole(mark)):
                end = min(end, self._undecided_from(mark))
            if match is not None:
                found = _Found(region, match, opens)
                first = found if first is None or found.place < first.place else first
        if first is not None and not self._has_ended and first.match.start() >= end:
            first = None
        return first, end

    def _watched(self) -> list[tuple[Region, Mark, bool]]:
        region = self._open.region
        closing = [(region, region.closes, False)] if region is not None and region.closes is not None else []
        if self._open.is_inside:
            return closing
        return [(one, one.opens, True) for one in self._template.regions if one.opens is not None] + closing

    def _match(self, mark: Mark) -> Match | None:
        match = mark.first_in(self._text, self._at)
        while match is not None and match.end() - match.start() > MAX_MARK_CHARS:
            match = mark.first_in(self._text, match.start() + 1)
        return match

    def _undecided_from(self, mark: Mark) -> int:
        start = mark.undecided_from(self._text, self._at)
        while len(self._text) - start > MAX_MARK_CHARS:
            start = mark.undecided_from(self._text, start + 1)
        return start

    def _is_whole(self, mark: Mark) -> bool:
        return bool(mark.literals) and all(literal in self._whole_marks for literal in mark.literals)

    def _own_text(self, end: int) -> str:
        return self._text[max(self._at, self._own_at) : end]

    def _take(self, end: int) -> None:
        """Give text to the region."""
        own, text = self._own_text(end), self._text[self._at : end]
        self._num_still = 0 if text else self._num_still
        self._at = end
        region = self._open.region
        if region is None:
            if self._outside is not None:
                self._outside.append(own)
        elif region.kind is RegionKind.CALLS:
            self._open.body.append(text)
            self._open.written.append(own)
        else:
            self._shown[region.kind].add_text(own, self._show_of(region.kind), strips=region.strips)

    def _show_of(self, kind: RegionKind) -> Callable[[str], None]:
        return self._sink.reasoning if kind is RegionKind.THINKING else self._sink.content

    def _pass_mark(self, found: _Found) -> None:
        match = found.match
        own = self._own_text(match.end())
        captures = {name: text for name, text in match.groupdict().items() if text is not None}
        self._num_still = 0 if match.end() > self._at else self._num_still + 1
        self._at = match.end()
        self._outside = None
        if found.opens:
            self._leave()
            self._open = _Open(found.region, True, captures, written=[own])
            self._shown[found.region.kind].begin_region(found.region.join)
        else:
            self._open.captures |= captures
            self._open.written.append(own)
            self._leave(is_cut=self._is_cut and match.start() == len(self._text))  # `$` matches no written mark

    def _leave(self, *, is_cut: bool = False) -> None:
        """End the region: the text outside all regions follows. `is_cut`: whether the region may be incomplete."""
        was, region = self._open, self._open.region
        if region is not None and region.kind is RegionKind.CALLS and (was.is_inside or "".join(was.body).strip()):
            self._show_calls(region, is_cut)
        implicit = self._template.implicit
        self._open = _Open(implicit)
        if implicit is not None:
            self._shown[implicit.kind].begin_region(implicit.join)

    def _show_calls(self, region: Region, is_cut: bool) -> None:
        """Of a region that was cut off, nothing is shown unless it is complete all the same."""
        assert region.parser is not None
        try:
            if is_cut and not region.is_json:
                raise ValueError("it may go on")
            value = region.parser("".join(self._open.body), self._tools)
            calls = calls_of(
                value, region.transform, self._open.captures, self._tools, transforms_each=region.transforms_each
            )
        except (ValueError, TimeoutError):
            if not is_cut:
                self._show_as_written("".join(self._open.written))
            return
        for call in calls:
            self._sink.begin_call(call.name)
            self._sink.arguments(call.arguments)
            self._sink.end_call()

    def _show_as_written(self, text: str) -> None:
        self._shown[RegionKind.CONTENT].add_text(text, self._sink.content, strips=False)
