"""What a row of the table of call formats holds, and the rows of families that share a shape."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from router.tools.calls.call_shape import CallShape
from router.tools.calls.tagged_calls import TaggedCalls, invoke_calls


class CallIds(Enum):
    LONG = "call_ and 24 hexadecimal digits"
    SHORT = "nine letters and digits: Mistral's templates refuse other ids"
    NAMED = "functions.NAME:NUMBER: Kimi's template shows ids as they are sent, and the model knows only these"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`signs`: tuples of texts. A model whose chat template renders no call has this format if the template and its
    special tokens hold all texts of one tuple.

    `separator`: the text between a group's calls; None if a group has one call. `frames`: marks around content, which
    readers drop; `first_frame`: a text that is one at the answer's beginning only.
    """

    name: str
    shape: CallShape
    begins: tuple[str, ...]  # each of these texts begins a group of calls
    signs: tuple[tuple[str, ...], ...] = ()
    may_begin_bare: bool = False  # `begins` may be missing at the answer's beginning
    opens: str = ""
    separator: str | None = None
    closes: str = ""
    ends: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    first_frame: str = ""
    ids: CallIds = CallIds.LONG

    @property
    def markers(self) -> frozenset[str]:
        """The texts that must reach the reader, even if they hold special tokens."""
        return frozenset((*self.begins, *self.ends, *self.frames, *self.shape.markers))


def in_list(
    name: str,
    shape: CallShape,
    begins: tuple[str, ...],
    ends: tuple[str, ...] = (),
    signs: tuple[tuple[str, ...], ...] = (),
    **more: Any,
) -> ToolFormat:
    """A row whose calls stand in a list: `[call, call]`."""
    return ToolFormat(name, shape, begins, signs, opens="[", separator=",", closes="]", ends=ends, **more)


def invokes(name: str, begin: str, end: str, mark: str = "", **more: Any) -> ToolFormat:
    """A row whose calls are `<invoke name="f"><parameter name="a">value</parameter></invoke>`, in one group."""
    shape = invoke_calls(mark, end, **more)
    return ToolFormat(name, shape, (begin,), separator="", ends=(end,))


def functions(name: str, begin: str, end: str, padding: str) -> ToolFormat:
    """A row whose calls are `<function=f><parameter=a>value</parameter></function>`."""
    shape = TaggedCalls(
        opens="<function=",
        named=(">",),
        key="<parameter=",
        keyed=(">",),
        value_ends="</parameter>",
        ends="</function>",
        padding=padding,
        left_at=(end,),
    )
    return ToolFormat(name, shape, (begin,), ((begin, "<function=", "<parameter="),), ends=(end,))


def key_values(
    name: str, begin: str, end: str, *, suffix: str = "", prefix: str = "", group: tuple[str, str] | None = None
) -> ToolFormat:
    """A row whose calls are `f<arg_key>a</arg_key><arg_value>value</arg_value>`.

    `suffix`, `prefix`: of all tags. `group`: marks around all calls; `begin` and `end` are then a call's own."""
    key, value = f"{prefix}arg_key{suffix}>", f"{prefix}arg_value{suffix}>"
    shape = TaggedCalls(
        opens=begin if group else "",
        named=(f"<tool_sep{suffix}>",) if group else (),
        key=f"<{key}",
        keyed=(f"</{key}", f"<{value}"),
        value_ends=f"</{value}",
        ends=end if group else "",
        left_at=(group[1] if group else end,),
    )
    if group:
        return ToolFormat(name, shape, group[:1], separator="", ends=group[1:])
    return ToolFormat(name, shape, (begin,), ((begin, f"<{key}"),), ends=(end,))
