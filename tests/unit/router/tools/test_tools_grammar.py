"""Grammars of calls let through what models write and nothing else, and what they let through is read as calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import jsonschema
import llguidance
import pytest

from router.tools.answer import AnswerReader
from router.tools.calls.call_shape import Markers
from router.tools.calls.deltas import whole_answer
from router.tools.calls.format_row import ToolFormat
from router.tools.calls.formats import BY_NAME, FORMATS
from router.tools.grammar import tool_grammar
from router.tools.reasoning import THINK, Thought, framed
from router.tools.schemas.choice import ChoiceMode, ToolChoice
from router.tools.schemas.declared import Tool, parse_tools
from tests.support.bodies.tool_cases import CASES, TOOLS, Case
from tests.support.bodies.tool_formats import WRITTEN

AUTO = ToolChoice(ChoiceMode.AUTO, TOOLS)
REQUIRED = ToolChoice(ChoiceMode.REQUIRED, TOOLS)
NAMED = ToolChoice(ChoiceMode.NAMED, (TOOLS[1],))
OPEN, CLOSED = Thought(THINK, is_open=True), Thought(THINK, is_open=False)
STOPS = {name: written.stop for name, written in WRITTEN.items()}
TAGGED = sorted(name for name, row in BY_NAME.items() if framed(row.shape) is None)


def auto(row: ToolFormat, **options):  # type: ignore[no-untyped-def]
    return tool_grammar(row, AUTO, thought=framed(row.shape), **options)


def required(row: ToolFormat, **options):  # type: ignore[no-untyped-def]
    return tool_grammar(row, REQUIRED, thought=framed(row.shape), **options)


class Matcher:
    """llguidance over a vocabulary of bytes; markers in `special` and the `pieces` of text are tokens beyond them."""

    def __init__(self, special: Sequence[str] = (), pieces: Sequence[bytes] = ()) -> None:
        self.eos_token_id, self.bos_token_id = 256, None
        self.tokens = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in ("<eos>", *special)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.tokens += pieces
        self.special_ids = {mark: 257 + index for index, mark in enumerate(special)}
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def start(self, grammar: str | None):  # type: ignore[no-untyped-def]
        assert grammar is not None
        compiled = llguidance.LLMatcher.grammar_from_lark(grammar)
        assert llguidance.LLMatcher.validate_grammar(compiled, self.tokenizer) == "", grammar
        return llguidance.LLMatcher(self.tokenizer, compiled)

    def ids(self, text: str) -> list[int]:
        for mark, number in self.special_ids.items():
            if mark in text:
                before, after = text.split(mark, 1)
                return [*self.ids(before), number, *self.ids(after)]
        return list(text.encode())

    def num_taken(self, grammar: str | None, text: str) -> int:
        """Return how many tokens of the text the grammar lets through; all and one more: it may end there."""
        matcher = self.start(grammar)
        ids = self.ids(text)
        num: int = matcher.try_consume_tokens(ids)
        assert not matcher.is_error() or num < len(ids), matcher.get_error()
        return num + (num == len(ids) and matcher.is_accepting())

    def takes(self, grammar: str | None, text: str) -> bool:
        return self.num_taken(grammar, text) == len(self.ids(text)) + 1

    def goes_on_to(self, grammar: str | None, text: str) -> bool:
        """Whether the text may stand there, at the end or not."""
        return self.num_taken(grammar, text) >= len(self.ids(text))


@pytest.fixture(scope="module")
def plain() -> Matcher:
    return Matcher()


def with_special(row: ToolFormat, *more: str) -> Matcher:
    """The published special tokens; of formats that have none, all marks."""
    return Matcher([*(WRITTEN[row.name].special or sorted(marks_of(row))), *more])


def marks_of(row: ToolFormat) -> set[str]:
    return {*row.begins, *row.ends}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.text[:40]!r}")
def test_auto_lets_through_what_models_write(case: Case, plain: Matcher) -> None:
    row = BY_NAME[case.format]
    assert plain.takes(auto(row), case.text) == case.is_grammatical
    special = with_special(row)
    assert special.takes(auto(row, special_ids=special.special_ids), case.text) == case.is_grammatical


@pytest.mark.parametrize("case", [case for case in CASES if case.is_grammatical], ids=lambda case: case.text[:40])
def test_required_lets_calls_through_alone(case: Case, plain: Matcher) -> None:
    grammar = required(BY_NAME[case.format])
    assert plain.takes(grammar, case.text) == (not case.content)
    assert plain.takes(grammar, case.text[len(case.content) :])


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_no_text_where_a_call_is_required(name: str, plain: Matcher) -> None:
    for choice in (REQUIRED, NAMED):
        grammar = tool_grammar(BY_NAME[name], choice, thought=framed(BY_NAME[name].shape))
        assert not plain.takes(grammar, "")
        assert not plain.goes_on_to(grammar, "Hello")
        assert plain.takes(grammar, STOPS[name])


@pytest.mark.parametrize("name", TAGGED)
def test_one_call_unless_more_are_allowed(name: str, plain: Matcher) -> None:
    row, two = BY_NAME[name], WRITTEN[name].two
    assert plain.takes(auto(row), two)
    assert plain.takes(required(row), two)
    assert not plain.goes_on_to(auto(row, allows_parallel=False), two)
    assert not plain.goes_on_to(required(row, allows_parallel=False), two)
    assert not plain.goes_on_to(tool_grammar(row, NAMED), two)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_named_lets_that_tool_through_alone(name: str, plain: Matcher) -> None:
    choice = ToolChoice(ChoiceMode.NAMED, (TOOLS[2],))
    named = tool_grammar(BY_NAME[name], choice, thought=framed(BY_NAME[name].shape))
    assert not plain.goes_on_to(named, STOPS[name])


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_behind_a_call_nothing_else_is_said(name: str, plain: Matcher) -> None:
    assert not plain.goes_on_to(auto(BY_NAME[name]), STOPS[name] + "\nDone")


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", "Any <text> {and} [more]"),
        ("hermes", '{"name": "stop"'),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", 'See {"name": "stop", "x": 1}'),
        ("mistral", '[{"name": "stop"}]'),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[stopped(1)]"),
        ("qwen3_coder", "<function=stop> x"),
    ],
)
def test_auto_lets_any_other_text_through(name: str, text: str, plain: Matcher) -> None:
    assert plain.takes(tool_grammar(BY_NAME[name], AUTO), text)


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", 'So <tool_call>{"name": "other'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": 1'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": {"a'),
        ("hermes", "<tool_call>" + " " * 9),
        ("llama3_json", "\n" * 60 + '{"name"\n\n\n\n\n\n: "stop", "x'),
        ("llama3_json", '<|python_tag|>{"name": "other'),
        ("mistral", "[TOOL_CALLS]stop"),
        ("mistral_args", "[TOOL_CALLS]get_weather[ARGS]{}"),
        ("pythonic", "\n" * 60 + "[" + " " * 60 + "get_weather(x"),
        ("pythonic", '[get_weather(city="a", days=1.5'),
        ("pythonic", '[get_weather(city="a" unit'),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n</function>"),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n</parameter>\n<parameter=days>\nx"),
    ],
)
def test_from_its_beginning_on_a_call_is_bound_to_the_schema(name: str, text: str, plain: Matcher) -> None:
    row = BY_NAME[name]
    assert plain.num_taken(tool_grammar(row, AUTO), text) < len(text)
    special = with_special(row)
    grammar = tool_grammar(row, AUTO, special_ids=special.special_ids)
    assert not special.goes_on_to(grammar, text)


@pytest.mark.parametrize("name", TAGGED)
def test_a_marker_that_is_a_token_is_never_spelled(name: str) -> None:
    """Readers see text: what ordinary tokens spell would begin a call to which no schema applies."""
    row = BY_NAME[name]
    special = with_special(row, "<think>", "</think>")
    for mark in Markers(special.special_ids).written(row.begins):
        matcher = special.start(tool_grammar(row, AUTO, special_ids=special.special_ids))
        spelled = list(f"so {mark}".encode())
        assert matcher.try_consume_tokens(spelled) == len(spelled) - 1, mark
    matcher = special.start(tool_grammar(row, AUTO, special_ids=special.special_ids, thought=OPEN))
    spelled = list(b"so </think>")
    assert matcher.try_consume_tokens(spelled) == len(spelled) - 1


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("is_special", [False, True])
def test_thoughts_stand_in_front(name: str, is_special: bool, plain: Matcher) -> None:
    row = BY_NAME[name]
    matcher = with_special(row, "<think>", "</think>") if is_special else plain
    call = STOPS[name]
    thought = "\nI could call this <b>\n</think>\n\n"
    for choice in (AUTO, REQUIRED):
        is_open = tool_grammar(row, choice, special_ids=matcher.special_ids, thought=OPEN)
        assert matcher.takes(is_open, thought + call)
        assert matcher.takes(is_open, thought + "Hi") == (choice is AUTO)
        assert matcher.takes(is_open, "I call " + call.lstrip()) == (not row.may_begin_bare)  # it ends the thought
        closed = tool_grammar(row, choice, special_ids=matcher.special_ids, thought=CLOSED)
        assert matcher.takes(closed, "<think>" + thought + call)
        assert matcher.takes(closed, "\n\n<think>" + thought + call)
        assert matcher.takes(closed, call)
        assert matcher.takes(closed, "<think>" + thought + "Hi") == (choice is AUTO)
        assert matcher.takes(closed, "Hi <b>") == (choice is AUTO)
        assert not matcher.takes(closed, "<think>\nHm")
        assert not matcher.goes_on_to(closed, "<think>" + thought + call + "Hi")


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_what_a_grammar_lets_through_is_read_as_calls(row: ToolFormat, mode: str, plain: Matcher) -> None:
    """Answers drawn byte by byte from what the grammar allows: each is calls of given tools with arguments that fit."""
    choice = ToolChoice(ChoiceMode(mode), TOOLS)
    schemas = {tool.name: dict(tool.schema) for tool in TOOLS}
    frame = framed(row.shape)
    begin = row.begins[0] if row.begins else WRITTEN[row.name].stop.partition("<|message|>")[0] + "<|message|>"
    begins = {"auto": "Hm " * (not row.may_begin_bare and frame is None) + begin, "required": ""}[mode]
    matcher = plain if frame is None else with_special(row)  # no vocabulary spells headers in plain text
    grammar = tool_grammar(row, choice, thought=frame, special_ids=matcher.special_ids)
    endings = [*ENDINGS, *row.shape.markers, *row.ends, *(f"]<]minimax[>[</{key}>" for key in ("city", "at", "item"))]
    for seed in range(20):
        text = draw(matcher, grammar, begins, random.Random(seed), endings)
        reader = AnswerReader(row, TOOLS, frame)
        deltas = [delta for char in text for delta in reader.feed(char)]
        whole = whole_answer(deltas + reader.finish())
        assert whole.calls and not reader.is_in_call, text
        assert whole.content == begins.removesuffix(begin), text
        for call in whole.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])


ENDINGS = ['"', "'", "}", "]", ")", "\n</parameter>", "</function>", "\n</tool_call>", '"}', "\\", "{", " ", "é"]


def draw(plain: Matcher, grammar: str | None, begins: str, rng: random.Random, endings: list[str]) -> str:
    """Return an answer that begins so. What ends something is drawn more often than a byte that may come next."""
    matcher = plain.start(grammar)
    data = b""
    assert matcher.consume_tokens(plain.ids(begins))
    special = range(257, len(plain.tokens))
    while not matcher.is_stopped():
        mask = matcher.compute_logit_bias()
        if mask[plain.eos_token_id] and rng.random() < 0.5:
            break
        allowed = [token for token in range(32, 127) if mask[token]] or [token for token in range(256) if mask[token]]
        step = rng.choice(endings).encode()
        ids = list(step)
        if marks := [token for token in special if mask[token] and rng.random() < 0.5]:
            ids = marks[:1]
        elif rng.random() < 0.5 or matcher.validate_tokens(ids) < len(ids):
            ids = [rng.choice(allowed or [token for token in special if mask[token]])]
        assert matcher.consume_tokens(ids), matcher.get_error()
        data += b"".join(plain.tokens[token] for token in ids)
        assert len(data) < 20_000
    return begins + data.decode()


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize("thought", [None, OPEN, CLOSED], ids=["no thought", "open", "closed"])
def test_no_call_is_read_where_the_grammar_saw_none(row: ToolFormat, thought: Thought | None, plain: Matcher) -> None:
    """Damaged answers: what auto lets through all the same has no call whose arguments do not fit."""
    thought = framed(row.shape) or thought
    fresh = plain.start(tool_grammar(row, AUTO, thought=thought))
    rng = random.Random(row.name)
    cases = [case.text for case in CASES if case.format == row.name]
    num_let_through = 0
    for _ in range(150):
        text = damaged(rng.choice(["", "", "<think>", "\n", "a\n</think>\n\n"]) + rng.choice(cases), rng)
        matcher = fresh.deep_copy()
        if matcher.try_consume_tokens(list(text.encode())) < len(text.encode()) or not matcher.is_accepting():
            continue
        num_let_through += 1
        reader = AnswerReader(row, TOOLS, thought)
        whole = whole_answer(reader.feed(text) + reader.finish())
        assert not reader.is_in_call, text
        for call in whole.calls:
            tool = next(tool for tool in TOOLS if tool.name == call.name)
            jsonschema.validate(json.loads(call.arguments), dict(tool.schema))
    assert num_let_through > 5


def damaged(text: str, rng: random.Random) -> str:
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(text) + 1)
        gone = rng.choice([0, 0, 1, 2, rng.randrange(20)])
        text = text[:at] + rng.choice(["", " ", "\n\n\n\n\n\n", "<", "{", '"', "]", "x", ",", "; "]) + text[at + gone :]
    return text


def tool_of(schema: object, strict: bool = False) -> Tool:
    function = {"name": "f", "parameters": schema, "strict": strict}
    return parse_tools([{"type": "function", "function": function}]).tools[0]


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder"])
def test_odd_schemas_make_grammars_of_formats_without_json(name: str, plain: Matcher) -> None:
    schema = {
        "properties": {
            "a": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "b": {"enum": ["x/y", 'q"\n', 3, None, True, 1.5]},
            "c": {"$ref": "#/properties/a"},
            "d": {"$ref": "#/$defs/loop"},
            "e": {"type": "array", "items": {"type": "array", "items": {"enum": ["é"]}}},
            "f": True,
            "g": {"const": "it's"},
            "i": {"type": "string", "enum": ["", 1, "</parameter>"]},
            "h": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
        "required": ["d", "f", "no-such"],
        "$defs": {"loop": {"type": "array", "items": {"$ref": "#/$defs/loop"}}},
    }
    grammar = tool_grammar(BY_NAME[name], ToolChoice(ChoiceMode.REQUIRED, (tool_of(schema),)))
    plain.start(grammar)
    if name == "pythonic":
        assert plain.takes(grammar, "[f(a=1, b='x/y', d=[[], [[]]], e=[['é']], f={}, g=\"it's\")]")
        assert not plain.goes_on_to(grammar, "[f(a=1, f")


def test_no_grammar_where_any_text_will_do() -> None:
    assert tool_grammar(BY_NAME["hermes"], ToolChoice(ChoiceMode.NONE)) is None
    assert tool_grammar(BY_NAME["hermes"], ToolChoice(ChoiceMode.AUTO, ())) is None


def test_many_tools_make_a_grammar_of_one_rule_each() -> None:
    tools = tuple(Tool(f"f{index}") for index in range(128))
    for row in map(BY_NAME.get, TAGGED):
        assert row is not None
        grammar = tool_grammar(row, ToolChoice(ChoiceMode.AUTO, tools))
        assert grammar is not None and grammar.startswith("start: ")
        assert sum(line.startswith("rest_") for line in grammar.splitlines()) == 128


def test_an_object_in_braces_may_hold_objects(plain: Matcher) -> None:
    inner = {
        "type": "object",
        "properties": {"p": {"type": "integer"}},
        "required": ["p"],
        "additionalProperties": False,
    }
    tool = tool_of({"properties": {"o": inner, "q": inner}, "required": ["o"], "additionalProperties": False})
    grammar = tool_grammar(BY_NAME["gemma4"], ToolChoice(ChoiceMode.REQUIRED, (tool,)))
    assert plain.takes(grammar, "<|tool_call>call:f{o:{p:1}}<tool_call|>")
    assert plain.takes(grammar, "<|tool_call>call:f{o:{p:1},q:{p:2}}<tool_call|>")
    assert not plain.goes_on_to(grammar, "<|tool_call>call:f{o:{o")
