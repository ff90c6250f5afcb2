"""Answers that are rows of messages with headers, and the reader of these.

<|start|>assistant<|channel|>analysis<|message|> ...reasoning... <|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|> {...} <|call|>
<|start|>assistant<|channel|>final<|message|> ...content... <|return|>

The prompt ends behind the first `<|start|>assistant`. Headers are read leniently: models put the recipient before or
behind the channel's name, and leave out parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.tools.calls.call_shape import CallRules, CallShape, Markers, json_rule, regex
from router.tools.calls.deltas import DeltaSink
from router.tools.calls.literals import json_string
from router.tools.calls.reading import (
    SPACE,
    NotACall,
    Reading,
    Source,
    copy_json,
    copy_until,
    peek,
    skip_any_space,
    tried,
)
from router.tools.calls.tagged_calls import invoke_calls
from router.tools.schemas.declared import Tool

MAX_HEADER_CHARS = 256
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([a-zA-Z0-9_.-]{1,128})")


@dataclass(frozen=True, slots=True)
class Channels:
    """`role`: the text that begins each message but the first. `message`: the mark between header and body.

    `thought`, `content`: headers as grammars write them. `is_thought`: a regular expression that finds the header of a
    thought. `calls`: the headers that a call may have, with {name}. `body`: the shape of calls in a body; None if the
    body is the JSON of the arguments. `body_begins`, `body_ends`: marks around calls of this shape.
    """

    role: str
    starts: tuple[str, ...]  # each begins a header
    message: str
    ends: tuple[str, ...]  # each ends a body
    thought: str
    content: str
    is_thought: re.Pattern[str]
    calls: tuple[str, ...]
    body: CallShape | None = None
    body_begins: str = ""
    body_ends: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        inner = self.body.markers if self.body is not None else ()
        known = (*self.starts, self.message, *self.ends, self.role, self.thought, self.content, *self.calls)
        return tuple(filter(None, (*known, self.body_begins, self.body_ends, *inner)))

    @property
    def next_end(self) -> str:
        """The mark behind a message that another one follows."""
        return self.ends[0]


HARMONY = Channels(
    role="<|start|>assistant",
    starts=("<|start|>", "<|channel|>"),
    message="<|message|>",
    ends=("<|end|>", "<|return|>", "<|call|>"),
    thought="<|channel|>analysis<|message|>",
    content="<|channel|>final<|message|>",
    is_thought=re.compile(r"<\|channel\|>\s*analysis\b"),
    calls=(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        " to=functions.{name}<|channel|>commentary json<|message|>",
        " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
    ),
)
RECIPIENTS = Channels(
    role="<|start|>assistant",
    starts=("<|start|>",),
    message="<|message|>",
    ends=("<|eom|>", "<|eot|>"),
    thought=" to=self<|message|>",
    content=" to=user<|message|>",
    is_thought=re.compile(r"\bto=self\b"),
    calls=(" to={name}<|message|>",),
    body=invoke_calls("atem:", "</atem:function_calls>"),
    body_begins="<atem:function_calls>",
    body_ends="</atem:function_calls>",
)


@dataclass(frozen=True, slots=True)
class ChannelCalls:
    """The shape of calls that are messages of their own. `ChannelReader` reads them, with all other messages."""

    channels: Channels

    @property
    def markers(self) -> tuple[str, ...]:
        return self.channels.markers

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        """The whole message, with its header, is the rest of the call."""
        channels = self.channels
        headers = [markers.rule(header.replace("{name}", tool.name)) for header in channels.calls]
        if channels.body is None:
            rules = {f"{prefix}_json": json_rule(tool.schema, is_strict=tool.is_strict)}
            body = f"{prefix}_json"
        else:
            inner = channels.body.rules(tool, prefix, markers)
            rules = dict(inner.rules)
            call = f"{inner.lead} {regex(inner.head)} {inner.rest}"
            body = " ".join((markers.rule(channels.body_begins), call, markers.rule(channels.body_ends, spaced=True)))
        rules[f"{prefix}_header"] = " | ".join(headers)
        return CallRules("", f"{prefix}_header {body}", rules)

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        raise NotACall
        yield


class ChannelReader:
    def __init__(self, channels: Channels, tools: Mapping[str, Tool], source: Source, sink: DeltaSink) -> None:
        self._channels = channels
        self._tools = tools
        self._source = source
        self._sink = sink
        self._marks = (*channels.starts, *channels.ends)
        self._header_starts = (*channels.starts, "to=")

    def read_messages(self, *, is_in_thought: bool) -> Reading[None]:
        """`is_in_thought`: the prompt has opened a thought."""
        source = self._source
        if is_in_thought:
            yield from self._body("", self._sink.reasoning)
        while (yield from peek(source)):
            header = yield from self._header()
            recipient = RECIPIENT.search(header)
            if self._channels.is_thought.search(header) and not self._is_tool(recipient):
                yield from self._body(header, self._sink.reasoning)
            elif self._is_tool(recipient):
                assert recipient is not None
                yield from self._call(recipient[1])
            else:
                yield from self._body(header, self._sink.content)

    def _is_tool(self, recipient: re.Match[str] | None) -> bool:
        return recipient is not None and recipient[1] in self._tools

    def _header(self) -> Reading[str]:
        """Move past a header and return it. Return "" and don't move if there is none: the body begins here."""
        source, message = self._source, self._channels.message
        source.mark()
        while True:
            text = source.text[source.at : source.at + MAX_HEADER_CHARS]
            end = text.find(message)
            if not self._may_be_header(text if end < 0 else text[:end]) or self._is_two(text[: max(end, 0)]):
                break
            if end >= 0:
                source.at += end + len(message)
                source.commit()
                return text[:end]
            if source.has_ended or len(text) == MAX_HEADER_CHARS:
                source.met_end = source.has_ended
                break
            yield
        source.rewind()
        if source.is_cut and source.text[source.at :].isspace():
            source.at = len(source.text)  # of a header that was cut off
        return ""

    def _is_two(self, header: str) -> bool:
        """Whether a text before another header was taken for a header: words stand before the first mark."""
        words = header.partition("<|")[0].split()
        return len(words) > 3

    def _may_be_header(self, text: str) -> bool:
        """Whether a mark of a header begins the text, or the text begins such a mark."""
        text = text.lstrip(SPACE)
        return any(text.startswith(start) or start.startswith(text) for start in self._header_starts)

    def _body(self, header: str, show: Callable[[str], None]) -> Reading[None]:
        """Show a body. A header that the reader does not know is not text."""
        source = self._source
        held = ""
        is_first = True

        def shown(text: str) -> None:
            nonlocal held, is_first
            if show == self._sink.content:
                show(text)
                return
            text = held + (text.lstrip(SPACE) if is_first else text)
            is_first = is_first and not text
            visible = text.rstrip(SPACE)
            held = text[len(visible) :]
            show(visible)

        if not header and (yield from peek(source)):
            starts = tuple(start for start in self._channels.starts if source.text.startswith(start, source.at))
            if starts:  # no header behind this mark: it is text
                shown(source.take_text(source.at + len(starts[0])))
        mark = yield from copy_until(source, self._marks, shown)
        if mark in self._channels.starts:
            source.at -= len(mark)

    def _call(self, name: str) -> Reading[None]:
        source, sink = self._source, self._sink
        if self._channels.body is not None:
            yield from self._shaped_calls(self._channels.body)
            return
        sink.begin_call(name)
        yield from skip_any_space(source)
        if (yield from peek(source)) == "{":
            if not (yield from copy_json(source, sink.arguments)):
                return
            sink.end_call()
            mark = yield from self._copy_words(self._marks)
        else:
            written: list[str] = []
            mark = yield from copy_until(source, self._marks, written.append)
            body = "".join(written).strip()
            sink.arguments(f'{{"arguments": {json_string(body)}}}' if body else "{}" if mark else "")
            if mark or (body and not source.is_cut):
                sink.end_call()
        if mark in self._channels.starts:
            source.at -= len(mark)

    def _shaped_calls(self, shape: CallShape) -> Reading[None]:
        """Read calls between their marks. Any other text of the body is content."""
        source, channels = self._source, self._channels
        mark = yield from self._copy_words((channels.body_begins, *self._marks))
        if mark == channels.body_begins:
            while (yield from self._shaped_call(shape)):
                pass
            if self._sink.is_in_call:
                return
            mark = yield from self._copy_words((channels.body_ends, *self._marks))
        if mark == channels.body_ends:
            mark = yield from self._copy_words(self._marks)
        if mark in channels.starts:
            source.at -= len(mark)

    def _shaped_call(self, shape: CallShape) -> Reading[bool]:
        is_call = yield from tried(self._source, self._spaced_call(shape))
        return is_call and not self._sink.is_in_call

    def _spaced_call(self, shape: CallShape) -> Reading[None]:
        yield from skip_any_space(self._source)
        yield from shape.read(self._source, self._tools, self._sink)

    def _copy_words(self, marks: tuple[str, ...]) -> Reading[str]:
        """Show text up to a mark, unless it is white space."""
        words: list[str] = []
        mark = yield from copy_until(self._source, marks, words.append)
        text = "".join(words)
        self._sink.content("" if text.isspace() else text)
        return mark
