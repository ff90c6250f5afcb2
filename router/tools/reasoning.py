"""Split an answer into reasoning and content by the chat template's tags.

<think> ...reasoning... </think> (blank lines) ...content...
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from router.text.chat_template import DEFAULT, TOOL_USE
from router.tools.deltas import DeltaSink
from router.tools.reading import MAX_HELD_SPACE, SPACE, Reading, Source, copy_until, found, peek


@dataclass(frozen=True, slots=True)
class ThoughtTags:
    opening: str
    closing: str


TAGS = (
    ThoughtTags("<seed:think>", "</seed:think>"),
    ThoughtTags("<think>", "</think>"),
    ThoughtTags("[THINK]", "[/THINK]"),
)


@dataclass(frozen=True, slots=True)
class Thought:
    """`is_open`: the prompt has opened the thought, and the answer begins inside it."""

    tags: ThoughtTags
    is_open: bool


def thought_tags(sources: Mapping[str, str]) -> ThoughtTags | None:
    return _tags_in(sources.get(DEFAULT, ""), sources.get(TOOL_USE, ""))


@functools.cache
def _tags_in(*templates: str) -> ThoughtTags | None:
    return next((tags for tags in TAGS if any(tags.opening in t or tags.closing in t for t in templates)), None)


def thought_of(sources: Mapping[str, str], prompt: str, continued: str = "") -> Thought | None:
    """Return None if the answer can't have a thought.

    Tags count only at the prompt's end, because users may write tags, too. `continued`: the message that the answer
    continues.
    """
    tags = thought_tags(sources)
    if tags is None:
        return None
    if continued:
        is_open = continued.rfind(tags.opening) > continued.rfind(tags.closing)
        return Thought(tags, is_open=True) if is_open else None
    end = prompt.rstrip()
    if end.endswith(tags.closing):
        return None
    return Thought(tags, is_open=end.endswith(tags.opening))


def has_tag(text: str, thought: Thought | None) -> bool:
    return thought is not None and (thought.tags.opening in text or thought.tags.closing in text)


def split_thought(source: Source, thought: Thought, sink: DeltaSink) -> Reading[None]:
    if not thought.is_open and not (yield from _opens(source, thought.tags.opening)):
        return
    yield from _drop_blank_lines(source)
    held = ""

    def show(text: str) -> None:
        nonlocal held
        shown = (held + text).rstrip(SPACE)
        held = (held + text)[len(shown) :]
        sink.reasoning(shown)

    if (yield from copy_until(source, (thought.tags.closing,), show)):
        yield from _drop_blank_lines(source)
    else:
        sink.reasoning(held)


def _opens(source: Source, opening: str) -> Reading[bool]:
    """Move past the opening tag and white space before it. Return False without such a tag."""
    source.mark()
    num = 0
    while (char := (yield from peek(source))) and char in SPACE and num < MAX_HELD_SPACE:
        source.at += 1
        num += 1
    is_open = yield from found(source, opening)
    if is_open:
        source.commit()
    else:
        source.rewind()
    return is_open


def _drop_blank_lines(source: Source) -> Reading[None]:
    source.mark()
    while (char := (yield from peek(source))) and char in SPACE:
        source.at += 1
        if char == "\n":
            source.mark()
    source.rewind()
