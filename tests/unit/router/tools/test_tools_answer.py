"""Answers are read into the same deltas however they are cut; what is no call stays content, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tools.answer import AnswerReader
from router.tools.calls.deltas import (
    AnswerDelta,
    CallArguments,
    CallBegun,
    ContentText,
    ReasoningText,
    WholeAnswer,
    WholeCall,
    whole_answer,
)
from router.tools.calls.formats import BY_NAME, FORMATS
from router.tools.reasoning import THINK, Thought, framed
from tests.support.bodies.tool_cases import CASES, FULL_JSON, TOOLS, Case
from tests.support.bodies.tool_formats import WRITTEN

THOUGHTS = [None, Thought(THINK, is_open=True), Thought(THINK, is_open=False)]
PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>"),
    *("<function=", "get_weather", "stop", ">", "<parameter=city>", "</parameter>", "</function>", "<think>"),
    *("<parameter=at>", '["', '"]', '["</parameter>"]'),
    *("</think>", '{"name": "stop"', '"arguments": ', '"parameters":', "{", "}", "[", "]", "(", ")", "city=", "days="),
    *(";", ",", ":", '"', "'", "\\", "\\u00e9", " ", "\n", "\n\n", "<", "[T", "é", "1", "True", '{"city": "x"}'),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=24).map("".join)
ROWS = st.sampled_from([None, *FORMATS])


def deltas_of(reader: AnswerReader, pieces: Iterable[str]) -> list[AnswerDelta]:
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    return deltas + reader.finish()


def reader_of(name: str, thought: Thought | None = None) -> AnswerReader:
    row = BY_NAME[name]
    return AnswerReader(row, TOOLS, framed(row.shape) or thought)


def read(name: str, text: str, thought: Thought | None = None) -> WholeAnswer:
    return whole_answer(deltas_of(reader_of(name, thought), [text]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.text[:40]!r}")
def test_calls_of_each_format(case: Case) -> None:
    whole = whole_answer(deltas_of(reader_of(case.format), [case.text]))
    assert whole == WholeAnswer(case.content, "", case.calls)
    assert whole_answer(deltas_of(reader_of(case.format), case.text)) == whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.text[:40]!r}")
def test_a_reader_knows_after_any_beginning_if_it_is_in_a_call(case: Case) -> None:
    for size in range(len(case.text)):
        reader = reader_of(case.format)
        whole = whole_answer(deltas_of(reader, [case.text[:size]]))
        assert [call.name for call in whole.calls] == [call.name for call in case.calls][: len(whole.calls)]
        for index, call in enumerate(whole.calls):
            is_cut = reader.is_in_call and index + 1 == len(whole.calls)
            assert is_cut or call == case.calls[index]
            assert case.calls[index].arguments.startswith(call.arguments) or not case.is_grammatical
        if not whole.calls and framed(BY_NAME[case.format].shape) is None:
            assert whole.content.strip() == case.text[:size].strip()


@given(ROWS, st.sampled_from(THOUGHTS), TEXTS, st.data())
def test_any_cut_gives_the_same(row, thought, text, data) -> None:  # type: ignore[no-untyped-def]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    readers = [AnswerReader(row, TOOLS, thought if row is None else framed(row.shape) or thought) for _ in range(3)]
    whole, in_pieces, in_chars = map(deltas_of, readers, ([text], pieces, text))
    assert whole_answer(in_pieces) == whole_answer(whole) == whole_answer(in_chars)
    assert len({reader.is_in_call for reader in readers}) == len({reader.num_calls for reader in readers}) == 1
    assert _kinds(whole) == _kinds(in_pieces) == _kinds(in_chars)


@given(ROWS, TEXTS)
def test_without_a_call_the_content_is_the_text(row, text) -> None:  # type: ignore[no-untyped-def]
    reader = AnswerReader(row, TOOLS)
    whole = whole_answer(deltas_of(reader, text))
    assert whole.content == text or whole.calls
    assert whole.reasoning == ""


def _kinds(deltas: list[AnswerDelta]) -> list[type]:
    kinds: list[type] = []
    for delta in deltas:
        if not kinds or kinds[-1] is not type(delta) or isinstance(delta, CallBegun):
            kinds.append(type(delta))
    return kinds


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", "no call <tool_cal"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + " " * 100 + '{"name": "stop"}'),
        ("hermes", " \n "),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", 'An object: {"name": "stop", "parameters": {}}'),
        ("llama3_json", '{"type": "other", "name": "stop", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral_args", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral_args", "[TOOL_CALLS]stop[ARGS]x"),
        ("pythonic", "[1, 2] and [stop]"),
        ("pythonic", "Use [stop()]."),
        ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    ],
)
def test_text_that_is_no_call(name: str, text: str) -> None:
    assert read(name, text) == WholeAnswer(text, "", ())


def test_arguments_stream_as_they_come() -> None:
    reader = reader_of("hermes")
    assert reader.feed('Hm <tool_call>\n{"name": "get_weather"') == [ContentText("Hm "), CallBegun(0, "get_weather")]
    assert reader.feed(', "arguments": {"ci') == [CallArguments(0, '{"ci')]
    assert reader.feed('ty": "P') == [CallArguments(0, 'ty": "P')]
    assert reader.is_in_call
    assert reader.feed('"}}') == [CallArguments(0, '"}')]
    assert not reader.is_in_call
    assert reader.feed("\n</tool_call>") == []
    assert reader.finish() == []


def test_a_text_between_tags_streams_as_json() -> None:
    reader = reader_of("qwen3_coder")
    begun = reader.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nNew")
    assert begun == [CallBegun(0, "get_weather"), CallArguments(0, '{"city": "New')]
    assert reader.feed(' "Y"\n') == [CallArguments(0, ' \\"Y\\"')]
    assert reader.feed("</param") == []
    assert reader.feed("eter>\n<parameter=days>\n1") == [CallArguments(0, '"')]
    assert reader.feed("2\n</parameter>") == [CallArguments(0, ', "days": 12')]
    assert reader.feed("</function>") == [CallArguments(0, "}")]


LISTS = [  # what stands between the tags, and the arguments
    ('\n["see </parameter> here", "b"]\n', '{"at": ["see </parameter> here", "b"]}'),
    ('[["a\\"</parameter>"], {"</parameter>": 1}]', '{"at": [["a\\"</parameter>"], {"</parameter>": 1}]}'),
    ("\n['a', \"b\"]\n", '{"at": ["a", "b"]}'),
    ('\n["a\n', r'{"at": "[\"a"}'),
    ('\n["a"] and\n', r'{"at": "[\"a\"] and"}'),
]


@pytest.mark.parametrize(("value", "arguments"), LISTS)
def test_a_string_in_a_list_may_hold_an_end_tag(value: str, arguments: str) -> None:
    """The grammar allows it. A value that is no list ends at the first tag."""
    text = f"<tool_call>\n<function=get_weather>\n<parameter=at>{value}</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], text):
        whole = whole_answer(deltas_of(reader_of("qwen3_coder"), pieces))
        assert whole == WholeAnswer("", "", (WholeCall("get_weather", arguments),))


def test_a_python_string_streams_as_json() -> None:
    reader = reader_of("pythonic")
    assert reader.feed("[get_weather(city='New") == [CallBegun(0, "get_weather"), CallArguments(0, '{"city": "New')]
    assert reader.feed("\\") == []
    assert reader.feed("n\\'Y'") == [CallArguments(0, "\\n'Y\"")]
    assert reader.feed(", days=1") == []
    assert reader.feed("2)") == [CallArguments(0, ', "days": 12}')]


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    reader = reader_of("hermes")
    assert reader.feed("Hi <") == [ContentText("Hi ")]
    assert reader.feed("b> <tool") == [ContentText("<b> ")]
    assert reader.feed("_call>") == []
    assert reader.feed("x") == [ContentText("<tool_call>x")]
    bare = reader_of("llama3_json")
    assert bare.feed('{"na') == []
    assert bare.feed('mes": 1') == [ContentText('{"names": 1')]


def test_half_a_call_stays_a_call() -> None:
    reader = reader_of("hermes")
    deltas = deltas_of(reader, [f'<tool_call>\n{{"name": "get_weather", "arguments": {FULL_JSON[:20]}'])
    assert whole_answer(deltas) == WholeAnswer("", "", (WholeCall("get_weather", FULL_JSON[:20]),))
    assert reader.is_in_call and reader.num_calls == 1
    begun = reader_of("hermes")
    assert deltas_of(begun, ['<tool_call>\n{"name": "stop", "argu']) == [CallBegun(0, "stop")]
    assert begun.is_in_call


@pytest.mark.parametrize(
    "is_open, text, reasoning, content",
    [
        (True, "\nI think.\n\n</think>\n\nYes.\n", "I think.", "Yes.\n"),
        (True, "still thinking\n", "still thinking\n", ""),
        (True, "</think>Yes", "", "Yes"),
        (True, "a</think>  \n  Yes", "a", "  Yes"),
        (False, "<think>\nI <b>think</b>\n</think>\nYes <think>no</think>", "I <b>think</b>", "Yes <think>no</think>"),
        (False, "\n<think>\n\n</think>\n\nYes", "", "Yes"),
        (False, " Yes</think>", "", " Yes</think>"),
        (False, "<thinking>", "", "<thinking>"),
        (False, "<thi", "", "<thi"),
    ],
)
def test_thoughts(is_open: bool, text: str, reasoning: str, content: str) -> None:
    thought = Thought(THINK, is_open)
    assert whole_answer(deltas_of(AnswerReader(None, (), thought), text)) == WholeAnswer(content, reasoning, ())
    assert read("hermes", text, thought) == WholeAnswer(content, reasoning, ())


@pytest.mark.parametrize("name", sorted(name for name in BY_NAME if framed(BY_NAME[name].shape) is None))
def test_a_call_ends_a_thought_that_is_not_closed(name: str) -> None:
    """Some models call before they close their thought."""
    if BY_NAME[name].may_begin_bare:
        return  # without its mark a call in a thought can't be told
    for call in (WRITTEN[name].paris, WRITTEN[name].full):
        text = f"I look. {call}"
        expected = read(name, call)
        assert len(expected.calls) == 1
        assert read(name, text, Thought(THINK, is_open=True)) == replace(expected, reasoning="I look.")
        text = f"<think>\nI look. {call}\n</think>\n\nDone"
        assert read(name, text, Thought(THINK, is_open=False)) == replace(expected, reasoning="I look.", content="Done")


def test_a_mark_in_a_thought_is_thought() -> None:
    text = 'A <tool_call> tag, as in <tool_call>{"name": "other"}</tool_call>'
    assert read("hermes", f"{text}</think>Hi", Thought(THINK, is_open=True)) == WholeAnswer("Hi", text, ())


def test_a_thought_may_repeat_the_tag_that_the_prompt_wrote() -> None:
    assert read("hermes", "<think>\nWell</think>Hi", Thought(THINK, is_open=True)) == WholeAnswer("Hi", "Well", ())


BARE = [
    ('{"name": "stop", "arguments": {}}', 1),
    ('\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n', 1),
    ('```json\n{"name": "stop", "arguments": {}}\n```', 1),
    ('```\n{"name": "stop", "parameters": {}}\n```\n', 1),
    ('{"name": "other", "arguments": {}}', 0),
    ('{"name": "stop"}', 0),
    ('{"name": "stop", "age": 3}', 0),
    ('So: {"name": "stop", "arguments": {}}', 0),
    ("```json\n{}\n```", 0),
    ('{"name": "stop", "arguments": "x"}', 0),
]


@pytest.mark.parametrize(("text", "num_calls"), BARE)
def test_one_object_that_names_a_tool_is_a_call(text: str, num_calls: int) -> None:
    """Small models forget the tag."""
    for name in ("hermes", "glm", "qwen3_coder", "mistral_args", "gemma4"):
        for pieces in ([text], text):
            whole = whole_answer(deltas_of(reader_of(name), pieces))
            assert len(whole.calls) == num_calls
            assert whole.content.strip() == ("" if num_calls else text.strip())


def test_reasoning_streams() -> None:
    reader = reader_of("hermes", Thought(THINK, is_open=True))
    assert reader.feed("\nI ") == [ReasoningText("I")]
    assert reader.feed("am\n</th") == [ReasoningText(" am")]
    assert reader.feed("ink>\n") == []
    assert reader.feed("\nYes") == [ContentText("Yes")]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}', {"city": "Rome"}),
        ("hermes", '{"name": "get_weather", "arguments": [1, 2]}', {"arguments": [1, 2]}),
        ("hermes", '{"name": "get_weather", "arguments": "Rome"}', {"arguments": "Rome"}),
        ("hermes", '{"name": "get_weather", "arguments": null}', {}),
        ("harmony", "<|channel|>commentary to=functions.get_weather<|message|>Rome<|call|>", {"arguments": "Rome"}),
        ("harmony", "<|channel|>commentary to=functions.get_weather<|message|><|call|>", {}),
    ],
)
def test_arguments_that_are_no_object_are_kept(name: str, text: str, arguments: dict[str, object]) -> None:
    text = text if name == "harmony" else f"<tool_call>\n{text}\n</tool_call>"
    for pieces in ([text], text):
        (call,) = whole_answer(deltas_of(reader_of(name), pieces)).calls
        assert json.loads(call.arguments) == arguments


def test_words_before_a_header_are_no_header() -> None:
    text = "to=stop is how you do it. <|channel|>final<|message|>x"
    for pieces in ([text], text):
        whole = whole_answer(deltas_of(reader_of("harmony"), pieces))
        assert whole == WholeAnswer("to=stop is how you do it. x", "", ())


def test_many_nested_tags_take_time_in_proportion() -> None:
    mark = "]<]minimax[>["
    deep = f"{mark}<at>" * 5000 + f"{mark}</at>" * 5000
    text = f'{mark}<tool_call>{mark}<invoke name="get_weather">{deep}{mark}</invoke>{mark}</tool_call>after'
    whole = read("minimax_m3", text)  # a hang guard ends a reader that counts all marks at each mark
    assert whole.content == "after" and len(whole.calls) == 1 and isinstance(json.loads(whole.calls[0].arguments), dict)
