"""Answers of models that bring `response_template`: the reader, compared with transformers' own parser."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_parsing.response_parser import ResponseParser

from router.tools.answer import AnswerReader
from router.tools.calls.deltas import WholeAnswer, WholeCall, whole_answer
from router.tools.response_template import MAX_PROMPT_CHARS, response_template_of
from router.tools.schemas.declared import Tool
from shared.core.errors import ConfigError

SPECS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "data" / "response_templates.json").read_text())
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "near": {"type": "boolean"},
        "of": {"type": "array"},
    },
}
TOOLS = [Tool("weather", "", SCHEMA), Tool("now", "", {"type": "object", "properties": {}})]
HARMONY = (
    "<|channel|>analysis<|message|>So, {x}<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>analysis <|message|>again<|end|><|start|>assistant to=functions.weather<|channel|>"
    'commentary <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)
CASES = [  # template, prompt, answer
    (
        "qwen",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "<think>\nso < so\n</think>\n\nIn Rome.<|im_end|>",
    ),
    ("qwen", "<|im_start|>assistant\n<think>\n", "I am \n inside </think>Rome </tool_call> it is"),
    ("qwen", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "just <text> and </think>"),
    (
        "qwen",
        "<|im_start|>assistant\n",
        'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ro\\"me", "days": 2, "of": [1, {"a": null}]}}\n'
        '</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>\n',
    ),
    (
        "mistral_list",
        "[INST]hi[/INST]",
        '[THINK]so[/THINK][TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "abc"}, '
        '{"name": "now", "arguments": {}}]</s>',
    ),
    ("mistral_list", "[INST]hi[/INST]", "no [TOOL_CALL] at all</s>"),
    (
        "mistral_args",
        "[INST]hi[/INST]",
        '[THINK]so[/THINK]I look[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{"city": "[TOOL]"}[TOOL_CALLS]now[ARGS]{}',
    ),
    ("mistral_args", "x[/TOOL_RESULTS]", "plain [TOOL_CALLS] text</s>"),
    ("harmony", "<|start|>user<|message|>hi<|end|><|start|>assistant", HARMONY),
    (
        "harmony",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>so<|start|>assistant<|channel|>final<|message|>Ro<m|e",
    ),
    (
        "harmony",
        "<|start|>assistant<|channel|>analysis<|message|>",
        "so<|end|><|start|>assistant<|channel|>final<|message|>R",
    ),
    (
        "tags",
        "<bot>",
        '<thought level="2"> a </thoughts> </thought>  ok\n <invoke x="1" name="weather"><param name="city">Rome'
        '</param><param name="days">2</param><param name="of">[1]</param></invoke> <invoke name="now"></invoke>',
    ),
    ("tags", "<bot>", '<invoke name="weather"><param name="of">1</param><param name="of">2</param></invoke>'),
    ("lines", "<bot>\n", "So:\n<call=weather>\ncity = New = York\nnonsense\n\ndays=2\nnear = true\n</call><end>"),
    (
        "braces",
        "<turn>model\n",
        "<channel>thought\nhm</channel>"
        '<tool>call:weather{city: <|"|>a {b: "c"}<|"|>, days:2, of: [{x: "y, z:"}]}</tool>',
    ),
    ("python", "<bot>", " see <py>[weather(city='Rome', days=2, of=[1, {'a': None}]), now()]</py>"),
]


def reader_of(name: str, prompt: str = "", tools: list[Tool] = TOOLS, **more: Any) -> AnswerReader:
    template = response_template_of(SPECS[name])
    return AnswerReader(None, tools, template=template, opened=template.opened_by(prompt), **more)


def pieces_of(text: str, seed: int) -> list[str]:
    """Seed 0: the whole. Seed 1: each character for itself."""
    if seed < 2:
        return [text] if seed == 0 else list(text)
    draw, pieces = random.Random(seed), []
    while text:
        size = draw.choice((1, 2, 3, 5, 8, 30))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def read(reader: AnswerReader, text: str, seed: int = 0, *, is_cut: bool = False) -> WholeAnswer:
    deltas = []
    for piece in pieces_of(text, seed):
        deltas += reader.feed(piece)
    answer = whole_answer(deltas + reader.finish(is_cut=is_cut))
    assert reader.num_calls == len(answer.calls) and not reader.is_in_call
    return answer


def calls_in(answer: WholeAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def squeezed(text: str) -> str:
    return "".join(text.split())


def told_by_transformers(name: str, prompt: str, answer: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return thoughts, content and calls of all regions: the message itself keeps only the last of some."""
    parser = ResponseParser(SPECS[name], prefix=prompt, tools=[tool.for_template() for tool in TOOLS])
    events = [*parser.feed(answer), *parser.finalize()[1]]
    texts: dict[str, str] = {"content": "", "thinking": ""}
    calls = []
    for event in events:
        if event["type"] != "region_close":
            continue
        if event["field"] != "tool_calls":
            texts[event["field"].replace("reasoning_content", "thinking")] += event["value"]
            continue
        value = event["value"]
        calls += value if isinstance(value, list) else [value]
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return squeezed(texts["thinking"]), squeezed(texts["content"]), found


@pytest.mark.parametrize(("name", "prompt", "answer"), CASES)
def test_an_answer_is_read_as_transformers_reads_it(name: str, prompt: str, answer: str) -> None:
    thoughts, content, calls = told_by_transformers(name, prompt, answer)
    assert thoughts or content or calls
    for seed in range(12):
        found = read(reader_of(name, prompt), answer, seed)
        assert (squeezed(found.reasoning), squeezed(found.content), calls_in(found)) == (thoughts, content, calls), seed


@pytest.mark.parametrize(("name", "prompt", "answer"), CASES)
def test_a_cut_answer_is_the_beginning_of_the_whole(name: str, prompt: str, answer: str) -> None:
    whole = read(reader_of(name, prompt), answer)
    for end in range(len(answer)):
        cut = read(reader_of(name, prompt), answer[:end], end % 7, is_cut=True)
        assert squeezed(whole.reasoning).startswith(squeezed(cut.reasoning))
        assert squeezed(whole.content).startswith(squeezed(cut.content)), answer[:end]
        assert whole.calls[: len(cut.calls)] == cut.calls


def test_white_space_goes_only_at_the_ends_of_a_text() -> None:
    text = '<think>\n a\n\nb \n</think>\n\nIt \n <tool_call>{"name": "now", "arguments": {}}</tool_call>\nis. \n'
    for seed in range(9):
        answer = read(reader_of("qwen", "<|im_start|>assistant\n"), text, seed)
        assert answer == WholeAnswer("It \n \nis.", "a\n\nb", (WholeCall("now", "{}"),))
    kept = read(reader_of("python", "<bot>"), " a <py>[now()]</py> b ")
    assert kept.content == " a  b "


BROKEN = [
    ("qwen", '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>'),
    ("qwen", '<tool_call>{"name": "weather"}</tool_call>'),
    ("qwen", '<tool_call>{"name": "weather", "arguments": "no"}</tool_call>'),
    ("qwen", '<tool_call>{"name": "weather", "arguments": {"days": 1e999}}</tool_call>'),
    ("qwen", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("qwen", '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>'),
    ("qwen", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ("qwen", "<tool_call>[]</tool_call>"),
    ("mistral_list", "[TOOL_CALLS][]</s>"),
    ("mistral_list", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "other", "arguments": {}}]</s>'),
    ("mistral_list", "[TOOL_CALLS]{}</s>"),
    ("mistral_args", "[TOOL_CALLS]other[ARGS]{}</s>"),
    ("lines", "<call=other>\na=b\n</call>"),
    ("braces", '<tool>call:weather{city: <|"|>a}</tool>'),
    ("python", "<py>[weather(city=]</py>"),
    ("python", "<py>[other()]</py>"),
]


@pytest.mark.parametrize(("name", "region"), BROKEN)
def test_what_is_no_call_is_content_as_it_was_written(name: str, region: str) -> None:
    for seed in (0, 2, 3):
        answer = read(reader_of(name), f"Hm \n {region} \n so", seed)
        assert answer == WholeAnswer(f"Hm \n {region} \n so", "", ())


def test_without_tools_calls_are_content() -> None:
    text = 'a <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read(reader_of("qwen", tools=[]), f"<think>b</think>{text}") == WholeAnswer(text, "b", ())


def test_a_region_that_was_cut_off_is_a_call_if_it_is_complete() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}'
    assert calls_in(read(reader_of("qwen"), f"a {call}", is_cut=True)) == [("now", {})]
    assert read(reader_of("qwen"), f"a {call[:-1]}", is_cut=True) == WholeAnswer("a", "", ())
    assert read(reader_of("qwen"), f"a {call[:-1]}") == WholeAnswer(f"a {call[:-1]}", "", ())  # the model ended it
    lines = "<call=weather>\ncity=New Yo"
    assert read(reader_of("lines"), lines, is_cut=True) == WholeAnswer("", "", ())
    assert calls_in(read(reader_of("lines"), lines + "rk\n</call>", is_cut=True)) == [("weather", {"city": "New York"})]


def test_the_beginning_of_a_mark_is_dropped_if_cut() -> None:
    assert read(reader_of("qwen"), "a <to", is_cut=True).content == "a"
    assert read(reader_of("qwen"), "a <to").content == "a <to"
    marks = ("<think>", "<tool_call>", "<|im_end|>", "<|im_end|>\n")
    assert read(reader_of("qwen", whole_marks=marks), "a <to", is_cut=True).content == "a <to"


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    answer = read(reader_of("qwen"), '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>')
    assert answer.calls[0].arguments.encode() and calls_in(answer) == [("weather", {"city": "\ud800"})]


def test_a_prompt_is_read_behind_its_last_anchor_only() -> None:
    template = response_template_of(SPECS["qwen"])
    anchor = "<|im_start|>assistant\n"
    assert template.opened_by(f"{anchor}<think>a{anchor}<think>") == "<think>"
    assert template.opened_by("<think>") == "" and template.opened_by(anchor + "a" * MAX_PROMPT_CHARS) == ""
    assert read(reader_of("qwen", f"{anchor}a <thi"), "nk>b</think> c") == WholeAnswer(" c", "b", ())
    assert read(reader_of("qwen", f"{anchor}Hello"), " you") == WholeAnswer(" you", "", ())
    call = '<tool_call>{"name": "now", "arguments": '
    assert calls_in(read(reader_of("qwen", anchor + call), "{}}</tool_call>")) == [("now", {})]
    assert read(reader_of("qwen", anchor + call), "oh</tool_call>").content == "oh</tool_call>"


def field(name: str, **values: object) -> dict[str, Any]:
    return {"start_anchor": "<bot>", "fields": {name: values}}


HOSTILE = [
    field("thinking", open_pattern=r"(?:a+)+(?:b+)+c", close="x"),
    field("thinking", open="<t>", close_pattern=r"(\w+\s?)*\$"),
    field("thinking", open_pattern=r"(?=a)", close_pattern=r"(?=a)"),
    field("thinking", open_pattern=r"(?s:.*)z", close_pattern="x*"),
]


@pytest.mark.parametrize("spec", HOSTILE)
@pytest.mark.parametrize("seed", [0, 2])
def test_a_hostile_pattern_takes_bounded_time(spec: dict[str, Any], seed: int) -> None:
    """The tier's limit would end a search without a bound. No text is lost."""
    text = "<t>" + "a" * 2000 + "!"
    spec = {**spec, "fields": {**spec["fields"], "content": {}}}
    answer = read(AnswerReader(None, template=response_template_of(spec)), text, seed)
    assert (answer.content + answer.reasoning).count("a") == 2000


def test_a_hostile_tag_pattern_makes_content() -> None:
    args = {"tag_pattern": r"(?P<key>(?:a|aa)+)(?P<value>)b(?:\w+\w+)+:"}
    spec = field("tool_calls", open="<c>", close="</c>", content="xml-inline", content_args=args)
    text = f"<c>{'a' * 400}b{'c' * 400}</c>"
    assert read(AnswerReader(None, TOOLS, template=response_template_of(spec)), text).content == text


WRONG = [
    ([], "must be an object"),
    ({"start_anchor": "a"}, "fields"),
    ({"start_anchor": "a", "fields": {"content": {}}, "extra": 1}, "extra"),
    ({"start_anchor": "a", "fields": {"content": {}}, "version": 2}, "version 2"),
    ({"fields": {"content": {}}}, "start_anchor"),
    ({"start_anchor": "a", "fields": {"content": {}, "thinking": {}}}, "only one field"),
    (field("citations", open="a"), "'citations' is not supported"),
    (field("content", close="a", close_pattern="a"), "both close"),
    (field("content", close_pattern="("), "not a regular expression"),
    (field("content", close_pattern="a" * 3000), "at most"),
    (field("content", close=["a", ""]), "none empty"),
    (field("content", closes="a"), "closes"),
    (field("content", content="json"), "must be text"),
    (field("content", join=1), "join"),
    (field("content", content_args=[]), "content_args"),
    (field("tool_calls", content="yaml"), "'yaml' is not supported"),
    (field("tool_calls", content="json", content_args={"string_delims": ["a"]}), "string_delims"),
    (field("tool_calls", content="xml-inline"), "tag_pattern"),
    (field("tool_calls", content="xml-inline", content_args={"tag_pattern": "a"}), "key"),
    (field("tool_calls", content="kv-lines", content_args={"kv_sep": ""}), "kv_sep"),
    (field("tool_calls", content="kv-lines", content_args={"value_parser": "json"}), "value_parser"),
    (field("tool_calls", content="json", transform={"name": "f_{name}"}), "mixes"),
    (field("tool_calls", content="json", transform_each="yes"), "transform_each"),
]


@pytest.mark.parametrize(("spec", "words"), WRONG)
def test_what_is_wrong_is_named(spec: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        response_template_of(spec)
