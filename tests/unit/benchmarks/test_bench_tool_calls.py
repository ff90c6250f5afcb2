"""The bench of tool calls counts what a server returned: calls, names, arguments, and calls left in the text."""

from __future__ import annotations

import pytest

from benchmarks import tool_calls
from benchmarks.tool_calls import Answer, Case, is_lost, is_right, score, table

TIMER = Case("Set a timer for 10 minutes.", "set_timer", {"minutes": 10}, ("read_file", "set_timer"))


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
