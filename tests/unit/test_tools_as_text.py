"""Tools for a model whose template knows none: what the template gets, and what stays as it is."""

from __future__ import annotations

import json

import pytest

from router.api.answer_form import format_of
from router.text.chat_template import JinjaTemplate
from router.text.conversation import Conversation
from router.text.hashlm import hash_text_model
from router.text.interface import TextModel
from router.tools.as_text import FORMAT, ToolsAsText, with_tools
from router.tools.choice import ChoiceMode, ToolChoice
from shared.core.errors import ConfigError, InvalidRequest

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
NAMES_SYSTEM = "{# system #}" + PLAIN
KNOWS = NAMES_SYSTEM + "{{ '<tool_call>' }} {{ '{\"name\"' }} arguments"
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "größe"}},
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def model(source: str) -> TextModel:
    return TextModel(hash_text_model().tokenizer, JinjaTemplate({"default": source}, {}, {}))


def rendered(source: str, *messages: dict[str, object], tools: object = None) -> str:
    text = with_tools(model(source), "")
    assert isinstance(text.template, ToolsAsText)
    return text.template.render(Conversation(messages, tools=tools))  # type: ignore[arg-type]


def test_a_template_with_a_format_or_a_place_for_tools_stays() -> None:
    own = model(KNOWS)
    assert with_tools(own, "") is own
    reads = model("{% if tools %}{{ tools }}{% endif %}" + PLAIN)
    assert with_tools(reads, "mistral") is reads and isinstance(with_tools(reads, "").template, ToolsAsText)
    without = hash_text_model()
    assert with_tools(without, "") is without
    with pytest.raises(InvalidRequest, match="no chat template, .* --tool-format"):
        format_of(without, "", ToolChoice(ChoiceMode.AUTO))
    assert format_of(model(PLAIN), "", ToolChoice(ChoiceMode.AUTO)) is FORMAT
    with pytest.raises(ConfigError, match="no tool format 'none such'"):
        with_tools(own, "none such")


def test_naming_the_format_leaves_the_tools_in_the_chat() -> None:
    """The template has no place for them, whatever the format of calls is called."""
    for source in (PLAIN, NAMES_SYSTEM, "You may use tools. {{ date }}" + PLAIN + " tools"):
        assert isinstance(with_tools(model(source), "hermes").template, ToolsAsText)
        with pytest.raises(ConfigError, match="--tool-format mistral: .* no place for tools, .* are hermes"):
            with_tools(model(source), "mistral")


def test_the_functions_stand_in_the_system_message() -> None:
    hello = {"role": "user", "content": "Hello"}
    text = rendered(NAMES_SYSTEM, {"role": "system", "content": "Be brief."}, hello, tools=TOOLS)
    assert text.startswith("[system] Be brief.\n\nYou can call") and text.endswith("[user] Hello\n")
    for tool in TOOLS:
        assert json.dumps(tool["function"], ensure_ascii=False) in text
    assert all(mark in text for mark in (*FORMAT.begins, *FORMAT.ends))
    assert rendered(NAMES_SYSTEM, hello, tools=TOOLS).startswith("[system] You can call")


def test_without_a_system_message_the_first_question_has_them() -> None:
    text = rendered(PLAIN, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}, tools=TOOLS)
    assert text.startswith("[user] You can call") and text.endswith("\n\nHello\n") and "[system]" not in text


def test_calls_and_results_become_turns_that_alternate() -> None:
    """Two results are one message. A message without calls stays, with all its fields."""
    text = rendered(
        NAMES_SYSTEM,
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "Both.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": "4"},
        {"role": "assistant", "content": "Done"},
    )
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert text == f"[user] Add.\n[assistant] Both.\n{call}\n{call}\n[user] {results}\n[assistant] Done\n"


def test_a_chat_without_tools_is_rendered_as_before() -> None:
    messages = ({"role": "system", "content": "S"}, {"role": "user", "content": "U", "name": "n"})
    source = NAMES_SYSTEM + "{{ messages[1].name }}"
    assert rendered(source, *messages) == model(source).template.render(Conversation(messages))
