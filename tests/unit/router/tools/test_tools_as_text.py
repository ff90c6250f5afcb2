"""Tools for a model whose template knows none: what the template gets, and what stays as it is."""

from __future__ import annotations

import json

import pytest

from router.api.ask.answer_form import format_of
from router.text.chat.chat_template import JinjaTemplate
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel
from router.text.hashlm import hash_text_model
from router.tools.as_text import ToolsAsText
from router.tools.calls.formats import BY_NAME
from router.tools.detect import AS_TEXT as FORMAT
from router.tools.detect import speech_of
from router.tools.schemas.choice import ChoiceMode, ToolChoice
from shared.core.errors import ConfigError, InvalidRequest

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
NAMES_SYSTEM = "{# system #}" + PLAIN
KNOWS = NAMES_SYSTEM + "{{ tools }}" + "{{ '<tool_call>' }} {{ '{\"name\"' }} arguments"
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "größe"}},
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def model(source: str) -> TextModel:
    return TextModel(hash_text_model().tokenizer, JinjaTemplate({"default": source}, {}, {}))


def rendered(source: str, *messages: dict[str, object], tools: object = None) -> str:
    text = speech_of(model(source)).text
    assert isinstance(text.template, ToolsAsText)
    return text.template.render(Conversation(messages, tools=tools))  # type: ignore[arg-type]


def test_a_template_that_reads_tools_is_never_replaced() -> None:
    own = model(KNOWS)
    assert speech_of(own).text is own and speech_of(own).calls is FORMAT
    reads = model("{% if tools %}{{ tools }}{% endif %}" + PLAIN)
    assert speech_of(reads, "mistral").text is reads and speech_of(reads, "mistral").calls is BY_NAME["mistral"]
    assert speech_of(reads).text is reads and speech_of(reads).calls is None  # calls in a format that is not known
    assert isinstance(speech_of(model(PLAIN)).text.template, ToolsAsText) and speech_of(model(PLAIN)).calls is FORMAT
    with pytest.raises(ConfigError, match="no tool format 'none such'"):
        speech_of(own, "none such")


def test_what_can_not_be_read_is_not_enforced() -> None:
    without, reads = hash_text_model(), model("{% if tools %}{{ tools }}{% endif %}" + PLAIN)
    assert speech_of(without).text is without
    with pytest.raises(InvalidRequest, match="no chat template, .* --tool-format"):
        format_of(without, None, ToolChoice(ChoiceMode.AUTO))
    assert format_of(reads, None, ToolChoice(ChoiceMode.AUTO)) is None
    for mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED):
        with pytest.raises(InvalidRequest, match="tool_choice can only be auto .* --tool-format"):
            format_of(reads, None, ToolChoice(mode))
    assert format_of(reads, FORMAT, ToolChoice(ChoiceMode.REQUIRED)) is FORMAT
    assert format_of(reads, FORMAT, ToolChoice(ChoiceMode.NONE)) is None


def test_a_template_that_only_renders_calls_keeps_them() -> None:
    """DeepSeek V3.1's reads no tools, but its model was trained on its calls."""
    source = "{# system #}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls or [] %}" + (
        "<tool_call>{{ c.function.name }}<arg_key>city</arg_key><arg_value>{{ c.function.arguments.city }}</arg_value>"
        "<arg_key>days</arg_key><arg_value>{{ c.function.arguments.days }}</arg_value></tool_call>{% endfor %}\n"
        "{% endfor %}"
    )
    speech = speech_of(model(source))
    assert speech.calls is BY_NAME["glm"]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"city": "Oslo", "days": 1}}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = speech.text.template.render(Conversation(messages, tools=TOOLS))
    assert text.startswith("[system] You can call") and "<tool_call>get_weather<arg_key>city" in text  # the example
    assert "[assistant] <tool_call>add<arg_key>city</arg_key><arg_value>Oslo" in text


def test_a_template_that_needs_arguments_as_text_gets_them_so() -> None:
    source = "{{ tools }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls or [] %}" + (
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ \'\' + c.function.arguments }}}</tool_call>'
        "{% endfor %}\n{% endfor %}"
    )
    speech = speech_of(model(source))
    assert speech.calls is FORMAT
    text = speech.text.template.render(Conversation([{"role": "assistant", "content": "", "tool_calls": [CALL]}]))
    assert '{"name": "add", "arguments": {"a": 1}}' in text


def test_naming_the_format_leaves_the_tools_in_the_chat() -> None:
    """The template has no place for them, whatever the format of calls is called."""
    for source in (PLAIN, NAMES_SYSTEM, "You may use tools. {{ date }}" + PLAIN + " tools"):
        assert isinstance(speech_of(model(source), "hermes").text.template, ToolsAsText)
        with pytest.raises(ConfigError, match="--tool-format mistral: .* no place for tools, .* are hermes"):
            speech_of(model(source), "mistral")


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
