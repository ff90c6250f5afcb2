"""Answers with calls, as models of each format write them, and what they say. Read by readers, matched by grammars.

Here stands what `tool_formats` has not: odd spellings, texts around calls, and what only readers take.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from router.tools.calls.deltas import WholeCall
from router.tools.schemas.declared import Tool, parse_tools
from tests.support.bodies.tool_formats import WRITTEN

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer"},
        "at": {"$ref": "#/$defs/place"},
        "hourly": {"type": ["boolean", "null"]},
    },
    "required": ["city"],
    "$defs": {"place": {"type": "array", "items": {"type": "number"}}},
}
TOOLS: tuple[Tool, ...] = parse_tools(
    [
        {"type": "function", "function": {"name": "get_weather", "description": "Tells it.", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "stop"}},
        {"type": "function", "function": {"name": "get", "parameters": {}}},
    ]
).tools


@dataclass(frozen=True, slots=True)
class Case:
    """`is_grammatical`: the grammar lets it through; readers take more than models are allowed to write."""

    format: str
    text: str
    calls: tuple[WholeCall, ...]
    content: str = ""
    is_grammatical: bool = True


def call(name: str, **arguments: object) -> WholeCall:
    return WholeCall(name, json.dumps(arguments, ensure_ascii=False))


def raw(name: str, arguments: str) -> WholeCall:
    return WholeCall(name, arguments)


PARIS = call("get_weather", city="Paris")
STOP = call("stop")
FULL = call("get_weather", city='a "b"\\\n{é', unit="c", days=3, at=[1.5, -2], hourly=None)
FULL_JSON = FULL.arguments

HERMES = [
    Case(
        "hermes",
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {FULL_JSON}}}\n</tool_call>\n'
        '<tool_call>{"name":"stop","arguments":{}}</tool_call>',
        (FULL, STOP),
        "I look.\n",
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "{[\\""}}</tool_call>',
        (raw("get_weather", '{"city": "{[\\""}'),),
    ),
    Case("hermes", '<tool_call> {"name": "stop"}</tool_call>', (raw("stop", "{}"),), is_grammatical=False),
    Case(
        "hermes",
        '<tool_call>{"type": "function", "name": "stop", "parameters": {}, "id": "a}"}</tool_call>  \n',
        (STOP,),
        is_grammatical=False,
    ),
    Case("hermes", '<tool_call>{"name": "stop", "arguments": {}}</tool_call>\n\nDone.', (STOP,), "\n\nDone.", False),
    Case("hermes", '<tool_call>{"name": "stop", "arguments": {}</tool_call>', (STOP,), is_grammatical=False),
    Case(
        "hermes", '<tool_call><tool_call>{"name": "stop", "arguments": {}}</tool_call>', (STOP,), "<tool_call>", False
    ),
]
LLAMA = [
    Case(
        "llama3_json",
        '<|python_tag|>{"name": "stop", "parameters": {}}; {"name": "stop", "parameters": {}}',
        (STOP, STOP),
    ),
    Case("llama3_json", 'So: <|python_tag|>{"name": "stop", "parameters": {}}', (STOP,), "So: "),
    Case("llama3_json", '\n\n{"name":"stop","parameters":{}}', (STOP,)),
    Case("llama3_json", '{"type": "function", "name": "stop", "parameters": {}}', (STOP,)),
    Case("llama3_json", '{"name": "stop", "arguments": {}}; and', (STOP,), "; and", False),
]
MISTRAL = [
    Case(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {FULL_JSON}}}, {{"name": "stop", "arguments": {{}}}}]',
        (FULL, STOP),
    ),
    Case(
        "mistral", '[TOOL_CALLS][{"name": "stop", "arguments": {}, "id": "abcdefghi"}]', (STOP,), is_grammatical=False
    ),
    Case(
        "mistral_args",
        'Well.[TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]stop[CALL_ID]abcdefghi[ARGS]{}',
        (call("get", a=1), STOP),
        "Well.",
    ),
    Case("mistral_args", '[TOOL_CALLS]get_weather{"city": "Paris"}', (PARIS,), is_grammatical=False),
]
PYTHONIC = [
    Case("pythonic", '[get_weather(city="Paris"), stop()]', (PARIS, STOP)),
    Case(
        "pythonic",
        """[get_weather(city='a "b"\\\\\\n{\\u00e9', unit="c", days=3, at=[1.5, -2], hourly=None)]""",
        (FULL,),
    ),
    Case(
        "pythonic",
        "<|python_start|>[get(a={'b': [True, None, {}]}, c=-1.5)]<|python_end|>",
        (call("get", a={"b": [True, None, {}]}, c=-1.5),),
    ),
    Case("pythonic", "So <|python_start|>[stop()]", (STOP,), "So "),
    Case(
        "pythonic",
        "[get_weather(city=75001, days=int('3'))]",
        (call("get_weather", city="75001", days="int('3')"),),
        is_grammatical=False,
    ),
    Case(
        "pythonic",
        '[get(a="""x"\ny""", b = (1, 2,), c=0x1f, "junk", d="\\ud83d")]',
        (raw("get", '{"a": "x\\"\\ny", "b": [1, 2], "c": "0x1f", "d": "\\ud83d"}'),),
        is_grammatical=False,
    ),
    Case("pythonic", "[stop(), other()]", (STOP,), ", other()]", False),
]
CODER = [
    Case(
        "qwen3_coder",
        'I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\na "b"\\\n{é\n</parameter>\n'
        "<parameter=unit>\nc\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=at>\n[1.5, -2]\n"
        "</parameter>\n<parameter=hourly>\nnull\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n"
        "</tool_call>",
        (FULL, STOP),
        "I look.\n\n",
    ),
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=get>\n<parameter=a b>\n[1]\n</parameter>\n<parameter=c>\nx\n"
        "</parameter>\n</function>\n</tool_call>",
        (call("get", **{"a b": [1], "c": "x"}),),
    ),
    Case(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>\n\n\n</parameter><parameter=hourly>True"
        "</parameter><parameter=days>many</parameter>junk</tool_call>",
        (call("get_weather", city="\n", hourly=True, days="many"),),
        is_grammatical=False,
    ),
]
OTHERS = [
    Case(
        "apriel",
        '\n<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "stop", "arguments": {}}]'
        "</tool_calls>",
        (PARIS, STOP),
    ),
    Case(
        "granite",
        'So <|tool_call|>[\n  {"name": "get_weather", "arguments": {\n "city": "Paris"}}\n]',
        (raw("get_weather", '{\n "city": "Paris"}'),),
        "So ",
    ),
    Case(
        "seed_oss",
        "\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>a\n</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        (call("get_weather", city="a\n", days=3),),
    ),
]
WRITTEN_CASES = [
    *(Case(name, written.paris, (PARIS,)) for name, written in WRITTEN.items()),
    *(Case(name, written.full, (FULL,)) for name, written in WRITTEN.items()),
    *(Case(name, written.two, (STOP, STOP)) for name, written in WRITTEN.items() if written.two),
]
CASES = [*HERMES, *LLAMA, *MISTRAL, *PYTHONIC, *CODER, *OTHERS, *WRITTEN_CASES]
