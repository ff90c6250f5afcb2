"""The formats of tool calls.

answer   text  begins opens  call separator call  closes ends  (more groups, if a group has one call)
hermes         <tool_call>   {"name": ...}               </tool_call>
mistral        [TOOL_CALLS] [  {...}  ,  {...}  ]
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from router.text.chat_template import DEFAULT, TOOL_USE
from router.tools.call_shape import CallShape
from router.tools.json_calls import JsonCalls, NamedJsonCalls
from router.tools.python_calls import PythonCalls
from router.tools.xml_calls import XmlCalls
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`signs`: tuples of texts. A chat template has this format if it contains all texts of one tuple."""

    name: str
    shape: CallShape
    begins: tuple[str, ...]  # each of these texts begins a group of calls
    signs: tuple[tuple[str, ...], ...]
    may_begin_bare: bool = False  # `begins` may be missing at the answer's beginning
    opens: str = ""
    separator: str = ""  # "": a group has one call
    closes: str = ""
    ends: tuple[str, ...] = ()
    has_short_ids: bool = False  # ids have nine letters and digits, because Mistral's templates refuse other ids

    @property
    def markers(self) -> frozenset[str]:
        """The texts that must reach the reader, even if they are special tokens."""
        return frozenset((*self.begins, *self.ends, *self.shape.markers))


FORMATS = (
    ToolFormat(
        "mistral_args",
        NamedJsonCalls(arguments="[ARGS]", call_id="[CALL_ID]"),
        begins=("[TOOL_CALLS]",),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        has_short_ids=True,
    ),
    ToolFormat(
        "mistral",
        JsonCalls("arguments"),
        begins=("[TOOL_CALLS]",),
        signs=(("[TOOL_CALLS]",),),
        opens="[",
        separator=",",
        closes="]",
        has_short_ids=True,
    ),
    ToolFormat(
        "granite",
        JsonCalls("arguments"),
        begins=("<|tool_call|>",),
        signs=(("<|tool_call|>", "JSON list"),),
        opens="[",
        separator=",",
        closes="]",
    ),
    ToolFormat(
        "apriel",
        JsonCalls("arguments"),
        begins=("<tool_calls>",),
        signs=(("<tool_calls>[",),),
        opens="[",
        separator=",",
        closes="]",
        ends=("</tool_calls>",),
    ),
    ToolFormat(
        "seed_oss",
        XmlCalls(padding="", ends="</seed:tool_call>"),
        begins=("<seed:tool_call>",),
        signs=(("<seed:tool_call>", "<function=", "<parameter="),),
        ends=("</seed:tool_call>",),
    ),
    ToolFormat(
        "qwen3_coder",
        XmlCalls(padding="\n", ends="</tool_call>"),
        begins=("<tool_call>",),
        signs=(("<tool_call>", "<function=", "<parameter="),),
        ends=("</tool_call>",),
    ),
    ToolFormat(
        "hermes",
        JsonCalls("arguments"),
        begins=("<tool_call>",),
        signs=(("<tool_call>", '{"name"', "arguments"), ("<tool_call>", '{\\"name\\"', "arguments")),
        ends=("</tool_call>",),
    ),
    ToolFormat(
        "pythonic",
        PythonCalls(),
        begins=("<|python_start|>",),
        signs=(("[func_name1(",), ("[func_name(",)),
        may_begin_bare=True,
        opens="[",
        separator=",",
        closes="]",
        ends=("<|python_end|>",),
    ),
    ToolFormat(
        "llama3_json",
        JsonCalls("parameters"),
        begins=("<|python_tag|>", "<|python_start|>"),
        signs=(
            ('{"name": function name, "parameters"',),
            ("<|python_tag|>", '"parameters": '),
            ("<|python_start|>", '"parameters": '),
        ),
        may_begin_bare=True,
        separator=";",
        ends=("<|python_end|>",),
    ),
)
BY_NAME = {row.name: row for row in FORMATS}


def tool_format(sources: Mapping[str, str], name: str | None = None) -> ToolFormat | None:
    """Without a name, return the templates' format, if any. Raise ConfigError for an unknown name."""
    if name is not None:
        if name not in BY_NAME:
            raise ConfigError(f"there is no tool format {name!r}: {', '.join(sorted(BY_NAME))}")
        return BY_NAME[name]
    return _format_in(sources.get(TOOL_USE, sources.get(DEFAULT, "")))


@functools.cache
def _format_in(template: str) -> ToolFormat | None:
    for row in FORMATS:
        if any(all(sign in template for sign in signs) for signs in row.signs):
            return row
    return None
