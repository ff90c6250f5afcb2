"""Whatever history a client sends, the prompt shows all its texts, for every published template in tests/data."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from router.text.chat.chat_prompt import pieces_and_form
from router.text.chat.chat_template import JinjaTemplate
from router.text.chat.control_tokens import ControlTokens
from router.text.chat.conversation import Conversation, normalized
from router.text.chat.interface import ChatTemplate, TextModel
from router.text.chat.normal_form import AS_SENT, GENTLE, STRONG, Form, FormStep
from router.text.hashlm import HashTokenizer
from router.tools.detect import speech_of
from shared.core.errors import InvalidRequest
from tests.support.bodies.odd_histories import HISTORIES, TOOL, WORD, user
from tests.support.bodies.template_turns import speech

FOLDER = Path(__file__).parents[3] / "data" / "templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
USUAL = ("plain", "talk", "call", "work", "two calls")
SHOWS_SIX = "baton-features"  # a template of ours, which breaks off after six turns
UNABLE = {"NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"}  # it fails without tools, in transformers too


def template(name: str) -> ChatTemplate:
    """As a router loads it."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return speech_of(model(JinjaTemplate({"default": source}, TOKENS, {}))).text.template


def model(of: ChatTemplate | str) -> TextModel:
    made = JinjaTemplate({"default": of}, TOKENS, {}) if isinstance(of, str) else of
    return TextModel(HashTokenizer(), made, ControlTokens(TOKENS.values()))


def chat_of(messages: list[dict[str, Any]], **more: Any) -> Conversation:
    calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    return Conversation(messages, tools=[TOOL] if calls else None, **more)


def rendered(of: ChatTemplate | str, messages: list[dict[str, Any]], **more: Any) -> tuple[str, Form]:
    pieces, form = pieces_and_form(model(of), chat_of(messages, **more))
    return "".join(pieces), form


def words_in(messages: object) -> set[str]:
    return set(WORD.findall(json.dumps(messages)))


def takes(own: ChatTemplate, tools: object) -> bool:
    """Some templates fail on any tool, others without one, whatever is said."""
    try:
        own.render(Conversation([user()], tools=tools))  # type: ignore[arg-type]
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_shows_all_texts_of_a_history(name: str) -> None:
    own = template(name)
    can_do = {bool(tools): takes(own, tools) for tools in (None, [TOOL])}
    assert all(can_do.values()) or name in UNABLE
    for title, messages in HISTORIES.items():
        if not can_do[bool(chat_of(messages).tools)]:
            continue
        prompt, form = rendered(own, messages)
        gone = {word for word in words_in(messages) if word not in prompt}
        assert not gone or (form.lost and name == SHOWS_SIX), f"{title}: {gone} of {form} in {prompt}"
        assert not form.lost or gone, f"{title}: {form}, but nothing lacks in {prompt}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_usual_conversations_are_rendered_as_they_are(name: str) -> None:
    """Unless the template drops a text of one."""
    own = template(name)
    for title in USUAL:
        chat = chat_of(HISTORIES[title])
        try:
            native = own.render(normalized(chat))
        except InvalidRequest:
            continue
        if words_in(HISTORIES[title]) <= set(WORD.findall(native)):
            assert rendered(own, HISTORIES[title]) == (native, Form()), title


@pytest.mark.parametrize("step", [*GENTLE, AS_SENT, *STRONG], ids=lambda step: step.name)
@pytest.mark.parametrize("title", HISTORIES)
def test_a_step_drops_no_text_and_changes_a_copy(step: FormStep, title: str) -> None:
    chat = normalized(chat_of(HISTORIES[title]))
    before = copy.deepcopy(chat)
    changed = step.rewrite(chat)
    assert chat == before
    assert words_in(changed.messages) == words_in(chat.messages)
    assert thoughts_in(changed) == thoughts_in(chat)
    again = step.rewrite(changed)
    assert again is changed or step is AS_SENT


def thoughts_in(chat: Conversation) -> list[object]:
    return [message["reasoning_content"] for message in chat.messages if message.get("reasoning_content")]


BARE_TOOLS = [
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}},
        },
    },
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_need_no_descriptions(name: str) -> None:
    """gpt-oss's template and five others read them from every function and argument."""
    chat = Conversation([{"role": "user", "content": "Hi"}], tools=BARE_TOOLS)
    pieces, form = pieces_and_form(speech(name).text, chat)
    assert "Hi" in "".join(pieces) and not form.lost
    assert form.steps in ((), ("tools-described",))
