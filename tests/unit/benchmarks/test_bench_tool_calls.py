"""The bench of tool calls counts what a server returned: calls, names, arguments, and calls left in the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from benchmarks import tool_calls
from benchmarks.tool_calls import ASKED, TOOLS, Answer, Case, cases, format_of, is_lost, is_right, score, table

TIMER = Case("Set a timer for 10 minutes.", "set_timer", {"minutes": 10}, ("read_file", "set_timer"))


def called(name: str, arguments: Any, text: str | None = None) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def server(message_of: Callable[[dict[str, Any]], dict[str, Any] | None], template: Any = "") -> httpx.MockTransport:
    """`message_of` gets a request's body; None refuses the request."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy"}]})
        if request.url.path == "/tokenizer_info":
            return httpx.Response(200 if template else 404, json={"chat_template": template})
        message = message_of(json.loads(request.content))
        if message is None:
            return httpx.Response(400, json={"error": {"message": "no grammar"}})
        return httpx.Response(200, json={"choices": [{"message": message}]})

    return httpx.MockTransport(answer)


def run(monkeypatch: pytest.MonkeyPatch, transport: httpx.MockTransport, *flags: str) -> None:
    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **more: real(transport=transport, **more))
    assert tool_calls.main(["http://127.0.0.1:1", *flags]) == 0


def test_every_question_declares_what_it_needs() -> None:
    found = cases(len(ASKED))
    assert len({case.question for case in found}) == len(ASKED) == 40
    assert {case.name for case in found} == set(TOOLS)
    assert {len(case.declared) for case in found} == {1, 2, 3, 4}
    assert all(case.name in case.declared and len(set(case.declared)) == len(case.declared) for case in found)
    assert {case.declared.index(case.name) for case in found} == {0, 1, 2, 3}
    assert {case.name for case in cases(10)} == set(TOOLS)


@pytest.mark.parametrize(
    ("arguments", "is_so"),
    [
        ('{"minutes": 10}', True),
        ('{"minutes": 10.0}', True),
        ('{"minutes": 11}', False),
        ('{"minutes": "10"}', False),
        ('{"minutes": 10, "more": 1}', False),
        ('{"minutes": 10', False),
        ("[10]", False),
    ],
)
def test_arguments_are_compared_by_value(arguments: str, is_so: bool) -> None:
    assert is_right(TIMER, Answer("set_timer", arguments)) is is_so


def test_texts_are_compared_without_case_but_true_is_not_one() -> None:
    light = Case("", "switch_light", {"room": "kitchen", "on": True}, ("switch_light",))
    assert is_right(light, Answer("switch_light", '{"room": " Kitchen.", "on": true}'))
    assert not is_right(light, Answer("switch_light", '{"room": "kitchen", "on": 1}'))
    assert not is_right(light, Answer("read_file", '{"room": "kitchen", "on": true}'))


@pytest.mark.parametrize(
    ("text", "is_so"),
    [
        ("", False),
        ("The function set_timer can do that.", False),
        ("Here is {some} text", False),
        ('```json\n{"name": "set_timer", "arguments": {"minutes": 10}}\n```', True),
        ('{"name": "get_weather", "arguments": {}}', False),  # not declared
        ("[set_timer(minutes=10)]", True),
        ("def set_timer(minutes):\n    return {}", False),  # a program
        ("<tool_call>\n", True),
        ("<|channel|>commentary to=functions.x<|message|>", True),
    ],
)
def test_a_call_in_the_text_is_lost(text: str, is_so: bool) -> None:
    assert is_lost(TIMER, text) is is_so


def test_a_score_counts_each_kind_of_answer() -> None:
    answers = [
        Answer("set_timer", '{"minutes": 10}'),
        Answer("set_timer", '{"minutes": 1}', "set_timer {"),  # wrong arguments, and another call in the text
        Answer("read_file", '{"minutes": 10}'),
        Answer(text='{"name": "set_timer"}'),
        Answer(text="no"),
        Answer(refusal="400: no grammar"),
    ]
    found = score([TIMER] * 6, answers)
    assert found == tool_calls.Score(
        num_asked=6, num_called=3, num_named=2, num_right=1, num_lost=2, num_refused=1
    )  # fmt: skip
    assert list(table([("toy", "hermes", "auto", found)]))[-1] == (
        "| toy | hermes | auto | 6 | 50% | 33% | 17% | 2 | 1 |"
    )


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "?"),
        ("{{ messages }}", "no tools"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=a>{% endif %}", "qwen3_coder"),
        ("{% if tools %}<|channel|>{% endif %}", "harmony"),
        ("{% if tools %}write JSON{% endif %}", "other"),
    ],
)
def test_the_template_names_the_format(template: str | None, name: str) -> None:
    assert format_of(template) == name


def test_each_mode_asks_all_questions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[dict[str, Any]] = []

    def message_of(body: dict[str, Any]) -> dict[str, Any] | None:
        seen.append(body)
        question = body["messages"][0]["content"]
        case = next(case for case in cases(8) if case.question == question)
        if body["tool_choice"] == "required":
            return called(case.name, case.arguments)
        if case.name == "set_timer":
            return None
        text = json.dumps({"name": case.name, "arguments": dict(case.arguments)})
        return {"role": "assistant", "content": text if case.name == "read_file" else "I don't know."}

    templates = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "tools [TOOL_CALLS]"}]
    run(monkeypatch, server(message_of, templates), "--num", "8", "--show")
    assert [sum(body["tool_choice"] == mode for body in seen) for mode in ("auto", "required")] == [8, 8]
    assert all(body["temperature"] == 0 and body["model"] == "toy" for body in seen)
    told = capsys.readouterr()
    assert told.out.splitlines()[2:] == [
        "| toy | mistral | auto | 8 | 0% | 0% | 0% | 1 | 1 |",
        "| toy | mistral | required | 8 | 100% | 100% | 100% | 0 | 0 |",
    ]
    assert "auto: 1 requests were refused, the first with 400" in told.err
    assert 'Show me the file notes.txt. -> \'{"name": "read_file"' in told.err


def test_a_server_without_a_template_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--num", "2", "--model", "other", "--modes", "auto")
    run(monkeypatch, server(lambda body: called("set_timer", {"minutes": 10})), *flags)
    assert capsys.readouterr().out.splitlines()[2:] == ["| other | ? | auto | 2 | 100% | 50% | 50% | 0 | 0 |"]
