"""The published tags of thoughts, and the reader that splits an answer into reasoning and content by them.

<think> ...reasoning... </think> (blank lines) ...content...
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from router.text.chat.chat_template import DEFAULT, TOOL_USE
from router.tools.calls.call_shape import CallShape
from router.tools.calls.channels import HARMONY, RECIPIENTS, ChannelCalls, Channels


@dataclass(frozen=True, slots=True)
class ThoughtTags:
    """`signs`: a template that holds one of these texts has these tags; without signs, either tag is a sign.

    `recurs`: thoughts may also stand later in an answer. `content`: what stands before the content, behind `then`, the
    text between a thought and what follows it. `frames`: marks around content, which readers drop. `channels`: set if
    the answer is a row of messages with headers.
    """

    opening: str
    closing: str
    signs: tuple[str, ...] = ()
    recurs: bool = False
    then: str = ""
    content: str = ""
    frames: tuple[str, ...] = ()
    channels: Channels | None = None

    @property
    def markers(self) -> frozenset[str]:
        inner = self.channels.markers if self.channels is not None else ()
        return frozenset(filter(None, (self.opening, self.closing, self.then, self.content, *self.frames, *inner)))

    def are_in(self, template: str) -> bool:
        return any(sign in template for sign in self.signs or (self.opening, self.closing))


def of_channels(channels: Channels) -> ThoughtTags:
    return ThoughtTags(
        channels.thought,
        channels.next_end,
        (channels.thought,),
        recurs=True,
        then=channels.role,
        content=channels.content,
        channels=channels,
    )


THINK = ThoughtTags("<think>", "</think>")
BRACKETS = ThoughtTags("[THINK]", "[/THINK]")
TAGS = (
    of_channels(HARMONY),
    of_channels(RECIPIENTS),
    ThoughtTags("<seed:think>", "</seed:think>"),
    ThoughtTags("<mm:think>", "</mm:think>"),
    ThoughtTags("<longcat_think>", "</longcat_think>"),
    ThoughtTags("<think:opensource>", "</think:opensource>", ("'<think{}>'",)),
    ThoughtTags(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>think",),
        content="<|open|>response<|sep|>",
        frames=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ThoughtTags("<|START_THINKING|>", "<|END_THINKING|>", content="<|START_TEXT|>", signs=("<|START_TEXT|>",)),
    ThoughtTags("<|START_THINKING|>", "<|END_THINKING|>", content="<|START_RESPONSE|>"),
    ThoughtTags("<|channel>thought\n", "<channel|>", ("<|channel>",), recurs=True),
    ThoughtTags("<|inner_prefix|>", "<|inner_suffix|>", recurs=True),
    ThoughtTags(
        "<|think|>",
        "<|end|>",
        ("<|begin|>assistant<|think|>",),
        recurs=True,
        then="<|begin|>assistant",
        content="<|content|>",
        frames=("<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
    ThoughtTags("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]", frames=("[END FINAL RESPONSE]",)),
    THINK,
    BRACKETS,
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
    return next((tags for tags in TAGS if any(map(tags.are_in, templates))), None)


def thought_of(sources: Mapping[str, str], prompt: str, continued: str = "") -> Thought | None:
    """Return None if the answer can't have a thought.

    Tags count only at the prompt's end, because users may write tags, too. `continued`: the message that the answer
    continues.
    """
    tags = thought_tags(sources)
    if tags is None:
        return None
    opening, closing = tags.opening.rstrip(), tags.closing
    if continued:
        is_open = continued.rfind(opening) > continued.rfind(closing)
        return Thought(tags, is_open) if is_open or tags.channels is not None else None
    end = prompt.rstrip()
    if end.endswith(closing) and not tags.recurs:
        return None
    return Thought(tags, is_open=end.endswith(opening))


def framed(shape: CallShape) -> Thought | None:
    """Return what frames an answer whose calls are messages; None for other shapes of calls."""
    return Thought(of_channels(shape.channels), is_open=False) if isinstance(shape, ChannelCalls) else None


def has_tag(text: str, thought: Thought | None) -> bool:
    return thought is not None and (thought.tags.opening in text or thought.tags.closing in text)
