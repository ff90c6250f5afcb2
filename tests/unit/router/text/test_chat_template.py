"""Chat templates: what they may use, what requests may set, how they fail, and that they end."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from router.text.chat import template_sandbox
from router.text.chat.call_arguments import MAX_DEPTH, WHOLE, as_object
from router.text.chat.chat_template import JinjaTemplate
from router.text.chat.conversation import Conversation, Scalar, normalized
from router.text.chat.interface import TextModel
from router.text.hashlm import HashTokenizer, PlainTemplate
from shared.core.errors import ConfigError, InvalidRequest
from tests.support.bodies.rendered import chat_text

USER = {"role": "user", "content": "hi"}


def made(source: str | Mapping[str, str], defaults: Mapping[str, Scalar] | None = None, **more: Any) -> TextModel:
    sources = {"default": source} if isinstance(source, str) else source
    return TextModel(
        HashTokenizer(), JinjaTemplate(sources, {"bos_token": "<s>", "image_token": "<i>"}, defaults or {}, **more)
    )


def text(source: str | Mapping[str, str], *messages: Mapping[str, object], **more: Any) -> str:
    return chat_text(made(source), Conversation(messages or (USER,), **more))


def refused(source: str, *messages: Mapping[str, object], **more: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        text(source, *messages, **more)
    return caught.value


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ {'é': 1, 'a': '<&>'} | tojson }}", '{"é": 1, "a": "<&>"}'),
        ("{{ {'é': 1} | tojson(ensure_ascii=True) }}", '{"\\u00e9": 1}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":[2],"b":1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abhic"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i > 2 %}{% break %}", None),
        ("{{ bos_token }}{{ eos_token }}{{ eos_token is defined }}", "<s>False"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ {'items': 1, 'get': 2}['items'] }}{{ {'x': 1}.x }}{{ {'x': 1}.y is defined }}", "11False"),
        ("{% for x in nothing %}a{% else %}b{% endfor %}{% for k in {'a': 1} %}{{ loop.length }}{% endfor %}", "b1"),
    ],
)
def test_what_a_template_may_use(source: str, shown: str | None) -> None:
    if shown is None:
        source, shown = source + "{% endif %}{% endfor %}", "023"
    assert text(source) == shown


def test_tool_arguments_become_mappings() -> None:
    def called(arguments: object) -> dict[str, object]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    source = "{{ messages[0].tool_calls[0].function.arguments }}{{ messages[0].content is defined }}"
    rows = [
        ('{"a": 1}', {"a": 1}),
        ('{"a": "line\nend"}', {"a": "line\nend"}),
        (" ", {}),
        ("null", {}),
        (None, {}),
        ("{cut", {"arguments": "{cut"}),
        ('{"city": "Ro', {"arguments": '{"city": "Ro'}),
        ("Rome", {"arguments": "Rome"}),
        ('"Rome"', {"arguments": "Rome"}),
        ("[1]", {"arguments": [1]}),
        (["Rome"], {"arguments": ["Rome"]}),
        ("5", {"arguments": 5}),
        (5, {"arguments": 5}),
    ]
    for given, shown in rows:
        assert text(source, called(given)) == f"{shown}False"
    kept = {"a": [1]}
    (message,) = normalized(Conversation([called(kept)])).messages
    assert message["tool_calls"][0]["function"]["arguments"] is kept  # type: ignore[index]
    assert text("{{ messages | length }}", {"tool_calls": [1, {"function": None}]}) == "1"


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 10_000])
def test_deep_arguments_are_one_text(depth: int) -> None:
    """Templates write objects by recursion."""
    sent = '{"a": ' * (depth - 1) + "[1]" + "}" * (depth - 1)
    arguments: Any = as_object(sent)
    if depth > MAX_DEPTH:
        assert arguments == {WHOLE: sent}
    else:
        assert json.dumps(arguments) == sent
        assert as_object({"b": arguments}) == {WHOLE: json.dumps({"b": arguments})}
        assert as_object(arguments) is arguments


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}),
        (r'{"a": ["x\ude00y", "\ud83d\ud83d\ude00"]}', {"a": ["x\ufffdy", "\ufffd\U0001f600"]}),
        (r'{"\uD83D": {"b": NaN}}', {"\ufffd": {"b": math.nan}}),
        (r'{"a": "\\ud83d \ud83d\ude00"}', {"a": r"\ud83d " + "\U0001f600"}),
        (r'{"a": "\ud83d"', {"arguments": r'{"a": "\ud83d"'}),
    ],
)
def test_arguments_hold_no_half_characters(sent: str, shown: object) -> None:
    """A model may write them, and clients send them back; no tokenizer takes them."""
    call = {"function": {"name": "f", "arguments": sent}}
    (message,) = normalized(Conversation([{"role": "assistant", "tool_calls": [call]}])).messages
    assert str(message["tool_calls"][0]["function"]["arguments"]) == str(shown)


def test_reasoning_is_found_under_all_its_names() -> None:
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    for name in ("reasoning_content", "reasoning"):
        assert text(source, {"role": "assistant", "content": "x", name: "r"}) == "r r"


def test_kwargs_of_the_request_go_before_those_of_the_server() -> None:
    model = made("{{ enable_thinking }} {{ effort }}", {"enable_thinking": False, "effort": "low"})
    assert chat_text(model, Conversation([USER])) == "False low"
    assert chat_text(model, Conversation([USER], kwargs={"enable_thinking": True})) == "True low"


@pytest.mark.parametrize(
    "name", ["messages", "bos_token", "image_token", "continue_final_message", "chat_template", "namespace", "%budget"]
)
def test_kwargs_can_t_set_what_is_not_theirs(name: str) -> None:
    error = refused("x", kwargs={name: "y"})
    assert error.param == "chat_template_kwargs" and repr(name) in error.message
    with pytest.raises(ConfigError, match="--chat-template-kwargs"):
        made("x", {name: "y"})


@pytest.mark.parametrize("value", [[1], {"a": 1}, object()])
def test_kwargs_are_scalars(value: Any) -> None:
    assert refused("x", kwargs={"a": value}).param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "fails",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages[0].content.x.y }}",
        "{{ messages | tojson(bad=1) }}",
        "{{ strftime_now(3) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10 ** 9) }}",
        "{{ 2 ** 5000 }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 'x' * 999999999 }}",
        "{{ 5 in 5 }}",
        "{{ messages | sum }}",
        "{{ raise_exception('x' * 5000) }}",
    ],
)
def test_any_error_names_its_line(fails: str) -> None:
    error = refused(f"line one\n{{% for m in messages %}}\n\n{fails}{{% endfor %}}")
    assert error.status == 400 and error.param == "messages" and "line 4" in error.message
    assert len(error.message) < 500


def test_an_error_in_a_macro_names_the_innermost_line() -> None:
    assert "line 2)" in refused("{% macro f(x) %}\n{{ x.y.z }}\n{% endmacro %}\n{{ f(1) }}").message


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "a\n{% generation %}",
        "{{ x | no_such_filter }}",
        "{" * 30,
        "{{" + "(" * 2000,
        "{% for i in messages %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_a_template_that_can_t_be_read_ends_the_start(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template 'default' can't be read"):
        made(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if a < 0 %}{% endfor %}" * 500,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[]] recursive %}{{ loop(range(900)) if loop.depth < 60 }}{% endfor %}",
    ],
)
def test_a_template_without_end_is_stopped(source: str) -> None:
    model = made(source, cpu_limit_s=0.02)
    with pytest.raises(InvalidRequest, match="CPU time"):
        chat_text(model, Conversation([USER]))


DOUBLING = "{{% set ns = namespace(x='x') %}}{{% for i in range(99) %}}{{% set ns.x = {} %}}{{% endfor %}}"


@pytest.mark.parametrize(
    "source",
    [
        *(DOUBLING.format(grown) for grown in ("ns.x ~ ns.x", "ns.x + ns.x", "ns.x * 2")),
        "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{% macro f(x, n) %}{{ f(x + x, n - 1) if n }}{% endmacro %}{{ f('x', 99) }}",
        "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{{ x }}{{ x }}{% else %}x{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for x in ['x'] recursive %}{{ loop([x + x]) if loop.depth < 99 }}{% endfor %}",
        "{{ 'xxxxxxxxxxx'.replace('', 'x' * 500) }}",
    ],
)
def test_a_text_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_TEXT", 1000)
    assert "grows above 1000" in refused(source).message


def test_each_rendering_has_its_own_time() -> None:
    """Threads share a template; one that is stopped stops no other."""
    model = made("{% for a in range(limit) %}{% for b in range(1000) %}{% endfor %}{% endfor %}done", cpu_limit_s=0.05)
    results: list[str] = []

    def render(limit: int) -> None:
        try:
            results.append(chat_text(model, Conversation([USER], kwargs={"limit": limit})))
        except InvalidRequest:
            results.append("stopped")

    threads = [threading.Thread(target=render, args=(limit,)) for limit in (0, 99999, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["done", "done", "done", "stopped"]


UNFINISHED = {"role": "assistant", "content": "I am "}
TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}{{ 'next' if add_generation_prompt }}"


def unfinished(source: str, *messages: Mapping[str, object]) -> str:
    return text(source, *messages, add_generation_prompt=False, continue_final_message=True)


def test_the_final_message_can_be_continued() -> None:
    assert unfinished(TURN, USER, UNFINISHED) == "<user>hi</>\n<assistant>I am "
    assert unfinished(TURN.replace("m.content", "m.content | trim"), UNFINISHED) == "<assistant>I am"
    assert text(TURN, UNFINISHED, add_generation_prompt=False) == "<assistant>I am </>\n"


def test_the_last_text_of_parts_is_continued() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "other"}]
    source = TURN.replace("m.content", "m.content | map(attribute='text') | select | join")
    assert unfinished(source, {"role": "assistant", "content": parts}) == "<assistant>ab"


@pytest.mark.parametrize("last", [{"role": "assistant"}, {"content": []}, {"content": [{"type": "image"}]}])
def test_nothing_to_continue_is_told(last: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="text") as caught:
        unfinished(TURN, last)
    assert caught.value.param == "continue_final_message"


def test_a_final_message_that_is_not_shown_is_told() -> None:
    with pytest.raises(InvalidRequest, match="changes the last message"):
        unfinished("{{ messages[0].content }}", USER, UNFINISHED)
    with pytest.raises(InvalidRequest, match="changes the last message"):
        unfinished("{{ messages[-1].content[3:] }}", UNFINISHED)
    with pytest.raises(InvalidRequest, match="needs a message"):
        chat_text(made(TURN), Conversation([], add_generation_prompt=False, continue_final_message=True))


def test_continuing_needs_no_new_turn() -> None:
    error = refused(TURN, UNFINISHED, continue_final_message=True)
    assert error.param == "continue_final_message" and "add_generation_prompt" in error.message


def test_models_without_a_template_take_parts_and_nulls() -> None:
    model = TextModel(HashTokenizer(), PlainTemplate())
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert chat_text(model, Conversation(messages)) == "user: ab assistant:  assistant: "
    assert chat_text(model, Conversation(messages, add_generation_prompt=False)) == "user: ab assistant: "
