"""What published templates write for an assistant reads back as the same message: its call, its thought, its text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from router.tools.answer import AnswerReader
from router.tools.calls.channels import HARMONY
from router.tools.calls.deltas import WholeAnswer, whole_answer
from router.tools.calls.format_row import ToolFormat
from router.tools.detect import ARGUMENTS, PROBE, READS_TOOLS
from tests.support.bodies.template_turns import (
    CONTENT,
    END,
    REASONING,
    Turn,
    answers_of,
    calls_of,
    names,
    sources_of,
    speech,
    template_of,
)

NO_CALLS = {  # these render no call of an assistant: its form is told in words, or by the vocabulary
    *("granite-3.1-8b-instruct", "granite-3.2-8b-instruct", "ibm-granite-granite-3.3-2B-Instruct"),
    *("GLM-4-9B-0414", "Phi-4-mini-instruct", "Llama-4-pythonic-vllm"),
}
FAILS = {  # these fail on calls in transformers, too, or write them as no model would
    "Kimi-K2-Instruct": "appends to a list",
    "Kimi-K2-Thinking": "appends to a list",
    "llama-cpp-deepseek-r1": "makes JSON of a generator",
    "Gemma-3-pythonic-vllm": "writes no comma between arguments",
}
OTHER_PROMPTS = {  # in histories these do not begin the assistant's turn as their prompts do
    *("DeepSeek-V3-0324-tools-vllm", "DeepSeek-V3.1-tools-vllm"),
    *("Hunyuan-A13B-tools-vllm", "llama-cpp-rwkv-world"),
}
UNKNOWN = {"baton-features"}  # reads tools, in no format that a model was trained on


def read(row: ToolFormat | None, turn: Turn, pieces: list[str]) -> WholeAnswer:
    reader = AnswerReader(row, [PROBE], turn.thought)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
    assert not reader.is_in_call
    return whole_answer(deltas)


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check_texts(answer: WholeAnswer, turn: Turn, message: dict[str, Any]) -> None:
    """The thought and the text are in the answer as far as the template shows them; nothing else is."""
    if message.get("tool_calls") and turn.thought is not None and turn.thought.tags.channels is HARMONY:
        assert answer.reasoning + answer.content == message["content"] + message.get("reasoning_content", "")
        return  # this template renders a text before a call as a thought
    assert answer.reasoning == (REASONING if REASONING in turn.text and "reasoning_content" in message else "")
    shown = CONTENT if CONTENT in turn.text and message["content"] else ""
    assert answer.content.strip().startswith(shown)
    assert END.fullmatch(answer.content.strip().removeprefix(shown)), answer.content


@pytest.mark.parametrize("name", names())
def test_calls_of_published_templates_read_back(name: str) -> None:
    spoken = speech(name)
    if name in NO_CALLS | FAILS.keys() | UNKNOWN or not any(map(READS_TOOLS.search, sources_of(name).values())):
        return
    turns = list(calls_of(spoken.text.template))
    assert turns and spoken.calls is not None
    rng = random.Random(name)
    for turn, message in turns:
        if PROBE.name not in turn.text or (spoken.calls.may_begin_bare and message["content"]):
            continue  # the template drops a call beside a text, or shows it as no reader could tell it
        for _ in range(5):
            answer = read(spoken.calls, turn, split(turn.text, rng))
            assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [(PROBE.name, ARGUMENTS)]
            if name not in OTHER_PROMPTS:
                check_texts(answer, turn, message)


@pytest.mark.parametrize("name", names())
def test_answers_of_published_templates_read_back(name: str) -> None:
    spoken = speech(name)
    rng = random.Random(name)
    for turn, message in answers_of(template_of(sources_of(name))) if name not in UNKNOWN | OTHER_PROMPTS else ():
        for _ in range(5):
            answer = read(spoken.calls, turn, split(turn.text, rng))
            assert not answer.calls
            check_texts(answer, turn, message)
