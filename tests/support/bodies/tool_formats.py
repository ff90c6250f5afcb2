"""Calls as the models of each format write them: written by hand from published templates, models' pages and reports.

`special`: the marks that are special tokens in published vocabularies. `stop`: a call without arguments. `two`: two
such calls, where an answer may have several. `paris`, `full`: the calls PARIS and FULL of `tool_cases`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

DSML = "｜DSML｜"
M3 = "]<]minimax[>["
CITY = 'a "b"\\\n{é'
FULL = {"city": CITY, "unit": "c", "days": "3", "at": "[1.5, -2]", "hourly": "null"}
TEXTS = ("city", "unit")
FULL_JSON = '{"city": "a \\"b\\"\\\\\\n{é", "unit": "c", "days": 3, "at": [1.5, -2], "hourly": null}'


@dataclass(frozen=True, slots=True)
class Written:
    stop: str
    two: str
    paris: str
    full: str
    special: tuple[str, ...] = ()


def written(
    call: Callable[[str, Mapping[str, str]], str],
    begin: str = "",
    end: str = "",
    between: str = "",
    special: tuple[str, ...] = (),
) -> Written:
    """`call` writes a call of this name with these arguments, which are spelled as JSON, but texts bare."""
    stop, paris, full = call("stop", {}), call("get_weather", {"city": "Paris"}), call("get_weather", FULL)
    return Written(*(begin + text + end for text in (stop, stop + between + stop, paris, full)), special)


def invokes(begin: str, end: str, mark: str, text: str = "", other: str = "", special: tuple[str, ...] = ()) -> Written:
    """`text`, `other`: what the tag of an argument says of its kind."""

    def call(name: str, arguments: Mapping[str, str]) -> str:
        lines = (
            f'<{mark}parameter name="{key}"{text if key in TEXTS else other}>{value}</{mark}parameter>\n'
            for key, value in arguments.items()
        )
        return f'<{mark}invoke name="{name}">\n{"".join(lines)}</{mark}invoke>\n'

    return written(call, f"{begin}\n", end, special=special)


def key_values(begin: str, end: str, key: str, value: str, behind_name: str = "\n", group: str = "") -> Written:
    def call(name: str, arguments: Mapping[str, str]) -> str:
        lines = (f"<{key}>{k}</{key}>\n<{value}>{v}</{value}>\n" for k, v in arguments.items())
        return f"{begin}{name}{behind_name}{''.join(lines)}{end}"

    return written(call, f"<{group}>\n", f"\n</{group}>") if group else written(call)


def in_json(call: str, begin: str = "", end: str = "", between: str = "", special: tuple[str, ...] = ()) -> Written:
    """`call`: with NAME and JSON for name and arguments."""

    def one(name: str, arguments: Mapping[str, str]) -> str:
        inner = FULL_JSON if arguments is FULL else json.dumps(arguments)
        return call.replace("NAME", name).replace("JSON", inner)

    return written(one, begin, end, between, special)


NAMED = '{"name": "NAME", "arguments": JSON}'
PARAMETERS = '{"name": "NAME", "parameters": JSON}'
FULL_PYTHON = 'city="a \\"b\\"\\\\\\n{é", unit="c", days=3, at=[1.5, -2], hourly=None'
FULL_BRACES = 'city:QTa "b"\\\n{éQT,unit:QTcQT,days:3,at:[1.5,-2],hourly:null'


def in_braces(begin: str, end: str, quote: str) -> Written:
    def call(name: str, arguments: Mapping[str, str]) -> str:
        texts = FULL_BRACES if arguments is FULL else ",".join(f"{key}:QT{text}QT" for key, text in arguments.items())
        return f"{begin}call:{name}{{{texts.replace('QT', quote)}}}{end}"

    return written(call, special=(begin, end, quote))


def in_python(begin: str, end: str, between: str, special: tuple[str, ...] = ()) -> Written:
    def call(name: str, arguments: Mapping[str, str]) -> str:
        inner = FULL_PYTHON if arguments is FULL else ", ".join(f'{key}="{text}"' for key, text in arguments.items())
        return f"{name}({inner})"

    return written(call, begin, end, between, special)


K3 = ("<|open|>", "<|close|>", "<|sep|>")
K3_TYPES = {"city": "string", "unit": "string", "days": "number", "at": "array", "hourly": "null"}


def kimi_k3() -> Written:
    def call(name: str, arguments: Mapping[str, str]) -> str:
        inner = "".join(
            f'<|open|>argument key="{key}" type="{K3_TYPES[key]}"<|sep|>{value}<|close|>argument<|sep|>'
            for key, value in arguments.items()
        )
        return f'<|open|>call tool="{name}" index="1"<|sep|>{inner}<|close|>call<|sep|>'

    return written(call, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", special=K3)


def minimax_m3() -> Written:
    def member(key: str, value: str) -> str:
        return f"{M3}<{key}>{value}{M3}</{key}>"

    def call(name: str, arguments: Mapping[str, str]) -> str:
        given = {**arguments, "at": member("item", "1.5") + member("item", "-2")} if arguments is FULL else arguments
        return f'{M3}<invoke name="{name}">{"".join(member(*pair) for pair in given.items())}{M3}</invoke>\n'

    return written(call, f"{M3}<tool_call>\n", f"{M3}</tool_call>", special=(M3,))


def minicpm5() -> Written:
    def call(name: str, arguments: Mapping[str, str]) -> str:
        given = {**arguments, "city": f"<![CDATA[{CITY}]]>"} if arguments is FULL else arguments
        inner = "".join(f'<param name="{key}">{value}</param>' for key, value in given.items())
        return f'<function name="{name}">{inner}</function>'

    return written(call)


def functions(begin: str, end: str, padding: str) -> Written:
    def call(name: str, arguments: Mapping[str, str]) -> str:
        lines = (f"<parameter={key}>{padding}{value}{padding}</parameter>\n" for key, value in arguments.items())
        return f"{begin}\n<function={name}>\n{''.join(lines)}</function>\n{end}"

    return written(call, between="\n")


def step3() -> Written:
    plain = invokes("", "", "steptml:")
    opening, closing = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"

    def around(text: str) -> str:
        text = text.strip().replace("<steptml:invoke", f"{opening}<steptml:invoke")
        text = text.replace("</steptml:invoke>", f"</steptml:invoke>{closing}")
        return f"<｜tool_calls_begin｜>\n{text}\n<｜tool_calls_end｜>"

    texts = map(around, (plain.stop, plain.two, plain.paris, plain.full))
    return Written(
        *texts, ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", closing)
    )


HARMONY_SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
DEEPSEEK_SPECIAL = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
KIMI_SPECIAL = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
SOLAR_SPECIAL = (
    *("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
    *("<|calls|>", "<|begin|>", "<|content|>", "<|end|>", "<|think|>"),
)


def recipients() -> Written:
    plain = invokes("<atem:function_calls>", "</atem:function_calls>", "atem:")
    stop, weather = " to=stop<|message|>", " to=get_weather<|message|>"
    return Written(
        stop + plain.stop,
        "",
        weather + plain.paris,
        weather + plain.full,
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    )


WRITTEN: dict[str, Written] = {
    "apertus": in_json(
        '{"NAME": JSON}', "<|tools_prefix|>[", "]<|tools_suffix|>", ", ", ("<|tools_prefix|>", "<|tools_suffix|>")
    ),
    "apriel": in_json(NAMED, "<tool_calls>[", "]</tool_calls>", ", "),
    "command": in_json(
        '{"tool_call_id": "0", "tool_name": "NAME", "parameters": JSON}',
        "<|START_ACTION|>[\n    ",
        "\n]<|END_ACTION|>",
        ",\n    ",
        ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "command_actions": in_json(
        '{"tool_name": "NAME", "parameters": JSON}', "Action:\n```json\n[\n    ", "\n]```", ",\n    "
    ),
    "deepseek_v3": in_json(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
        DEEPSEEK_SPECIAL,
    ),
    "deepseek_v31": in_json(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "",
        DEEPSEEK_SPECIAL,
    ),
    **{
        name: invokes(f"<{DSML}{tag}>", f"</{DSML}{tag}>", DSML, ' string="true"', ' string="false"', (DSML,))
        for name, tag in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    },
    "dots": invokes("<dots_function_call>", "</dots_function_call>", ""),
    "function_call": in_json(f"<function_call> {NAMED}", between="\n"),
    "function_gemma": in_braces("<start_function_call>", "<end_function_call>", "<escape>"),
    "functionary": in_json("<function=NAME>JSON</function>", between=""),
    "functionary_v32": in_json("NAME\nJSON", between=">>>"),
    "gemma4": in_braces("<|tool_call>", "<tool_call|>", '<|"|>'),
    "gigachat3": in_json(
        f"<|message_sep|>\n\nfunction call<|role_sep|>\n{NAMED}",
        between="",
        special=("<|message_sep|>", "<|role_sep|>"),
    ),
    "gigachat31": in_json(f"<|function_call|>{NAMED}", between="", special=("<|function_call|>",)),
    "glm": key_values("<tool_call>", "</tool_call>", "arg_key", "arg_value"),
    "glm4": in_json("NAME\nJSON", between="<|assistant|>", special=("<|assistant|>",)),
    "granite": in_json(NAMED, "<|tool_call|>[", "]", ", ", ("<|tool_call|>",)),
    "harmony": replace(
        in_json("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON", special=HARMONY_SPECIAL),
        two="",
    ),
    "hermes": in_json(f"<tool_call>\n{NAMED}\n</tool_call>", between="\n"),
    **{
        f"hunyuan{mark.replace(':', '_')}": key_values(
            *(f"<tool_call{mark}>", f"</tool_call{mark}>", f"arg_key{mark}", f"arg_value{mark}", f"<tool_sep{mark}>\n"),
            group=f"tool_calls{mark}",
        )
        for mark in ("", ":opensource")
    },
    "internlm": in_json(
        PARAMETERS,
        "<|action_start|><|plugin|>\n",
        "<|action_end|>",
        "<|action_end|><|action_start|><|plugin|>",
        ("<|action_start|>", "<|action_end|>", "<|plugin|>"),
    ),
    "iquest": key_values("<iquest_tool_call>", "</iquest_tool_call>", "arg_key", "arg_value"),
    "kimi_k2": in_json(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "",
        KIMI_SPECIAL,
    ),
    "kimi_k3": kimi_k3(),
    "lfm2": in_python("<|tool_call_start|>[", "]<|tool_call_end|>", ", ", ("<|tool_call_start|>", "<|tool_call_end|>")),
    "llama3_json": in_json(PARAMETERS, between="; "),
    "longcat": in_json(f"<longcat_tool_call>\n{NAMED}\n</longcat_tool_call>", between="\n"),
    "longcat_keys": key_values("<longcat_tool_call>", "</longcat_tool_call>", "longcat_arg_key", "longcat_arg_value"),
    "minicpm5": minicpm5(),
    "minimax_m1": in_json(NAMED, "<tool_calls>\n", "\n</tool_calls>", "\n"),
    "minimax_m2": invokes("<minimax:tool_call>", "</minimax:tool_call>", ""),
    "minimax_m3": minimax_m3(),
    "mistral": in_json(NAMED, "[TOOL_CALLS][", "]", ", ", ("[TOOL_CALLS]",)),
    "mistral_args": in_json("[TOOL_CALLS]NAME[ARGS]JSON", between="", special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "nemotron": in_json(NAMED, "<TOOLCALL>[", "]</TOOLCALL>", ", "),
    "olmo3": in_python("<function_calls>\n", "\n</function_calls>", "\n"),
    "phi4": in_json(NAMED, "<|tool_call|>[", "]<|/tool_call|>", ", ", ("<|tool_call|>", "<|/tool_call|>")),
    "pythonic": in_python("[", "]", ", "),
    "qwen3_coder": functions("<tool_call>", "</tool_call>", "\n"),
    "recipients": recipients(),
    "seed_oss": functions("<seed:tool_call>", "</seed:tool_call>", ""),
    "solar": in_json(
        "<|tool_call:begin|>id1<|tool_call:name|>NAME<|tool_call:args|>JSON<|tool_call:end|>",
        "<|tool_calls|>",
        "<|calls|>",
        "",
        SOLAR_SPECIAL,
    ),
    "step3": step3(),
    "xlam": in_json(NAMED, "[", "]", ", "),
}
