"""The assistant's turns as published templates render them: what a model is trained to write behind its prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.text.chat.chat_template import JinjaTemplate
from router.text.chat.conversation import Conversation, normalized
from router.text.chat.interface import ChatTemplate, TextModel
from router.text.hashlm import hash_text_model
from router.tools.detect import ARGUMENTS, PROBE, Speech, speech_of
from router.tools.reasoning import Thought, thought_of
from shared.core.errors import InvalidRequest

FOLDER = Path(__file__).parents[2] / "data" / "templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
THINKING = {"enable_thinking": True, "thinking": True}
USER = {"role": "user", "content": "What is the weather in Rome?"}
CONTENT, REASONING = "I look.", "I think."
CALL = {"id": "call1abcd", "type": "function", "function": {"name": PROBE.name, "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "tool_call_id": "call1abcd", "name": PROBE.name, "content": "sunny"}
# what stands behind an answer: marks without words
END = re.compile(r"(\s|</?[^<>\s]{1,60}>|<\|[^<>|]{1,60}\|>|\[e~\[|\]~b\])*")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def sources_of(name: str) -> dict[str, str]:
    return {"default": (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")}


def template_of(sources: Mapping[str, str]) -> JinjaTemplate:
    return JinjaTemplate(sources, TOKENS, {})


def speech(name: str) -> Speech:
    """Return what the router would find out about a model with this template."""
    return speech_of(TextModel(hash_text_model().tokenizer, template_of(sources_of(name))))


@dataclass(frozen=True, slots=True)
class Turn:
    """`text`: what the model writes. `thought`: as the prompt before it says."""

    text: str
    thought: Thought | None


def turn_of(template: ChatTemplate, *messages: Mapping[str, Any]) -> Turn | None:
    """Return the last message as the model writes it; None if the template refuses the messages."""
    before = _render(template, messages[:-1])
    prompt = _render(template, messages[:-1], add_generation_prompt=True)
    whole = _render(template, messages)
    if before is None or prompt is None or whole is None:
        return None
    opened = prompt.removeprefix(before).strip()
    start = max(0, num_common(before, whole) - len(opened) - 8)
    if whole.startswith(prompt):
        at = len(prompt)
    elif opened and opened in whole[start:]:
        at = whole.rfind(opened) + len(opened)
    else:
        at = max(prompt.rfind(mark, 0, num_common(prompt, whole)) for mark in ("\n", ">", "]")) + 1
    thought = thought_of(template.sources, whole[:at])
    if (
        thought is not None
        and thought.tags.closing in whole[at:].lstrip()[1:]
        and thought.tags.opening not in whole[at:]
    ):
        thought = thought_of(template.sources, prompt)  # the prompt opens a thought with words that no history has
    return Turn(whole[at:], thought)


def num_common(one: str, other: str) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def calls_of(template: ChatTemplate) -> Iterator[tuple[Turn, dict[str, Any]]]:
    """Yield the turns of a call, with and without text and thought before it, and their messages."""
    for more in ({}, {"content": CONTENT}, {"reasoning_content": REASONING}):
        message = {"role": "assistant", "content": "", "tool_calls": [CALL]} | more
        if (turn := turn_of(template, USER, message)) is not None:
            yield turn, message


def answers_of(template: ChatTemplate) -> Iterator[tuple[Turn, dict[str, Any]]]:
    """Yield the turns of an answer to the user and to a result."""
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for more in ({}, {"reasoning_content": REASONING}):
        for before in ([USER], [USER, call, RESULT]):
            message = {"role": "assistant", "content": CONTENT} | more
            if (turn := turn_of(template, *before, message)) is not None:
                yield turn, message


def _render(template: ChatTemplate, messages: Any, *, add_generation_prompt: bool = False) -> str | None:
    tools = [PROBE.for_template()]
    chat = Conversation(messages, tools=tools, kwargs=THINKING, add_generation_prompt=add_generation_prompt)
    try:
        return template.render(normalized(chat))
    except InvalidRequest:
        return None
