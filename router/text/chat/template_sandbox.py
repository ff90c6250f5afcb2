"""Run chat templates in Hugging Face's Jinja environment, with a sandbox and limits.

The sandbox bounds CPU time, and the size of the results of operators, calls and blocks. It does not bound a single
operation, such as an enormous format width. So a malicious template can use up memory and time, but can't loop forever
or reach files or other objects.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEXT = 16 << 20  # limit on a string's characters, and on a list's entries
MAX_EXPONENT = 1 << 10
MAX_NUMBER = 1 << 1024
STEPS_BETWEEN_LOOKS = 64
BUDGET = "%budget"  # templates can't write names with %
COUNTED = "%counted"
SIZED = "%sized"
DICT_NAMES = frozenset(dir(dict))
LOOP_NAMES = frozenset(name for name in dir(LoopContext) if name[0] != "_")
PLAIN_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}


class TemplateRefusal(Exception):
    """The template refused the messages, by calling `raise_exception`."""


class TemplateTooLong(Exception):
    """The template ran too long, or its text grew too long."""


class RenderBudget:
    """The time limit of one rendering: `limit_s` of wall-clock time, then `limit_s` of its thread's CPU time.

    A busy machine alone causes no refusal, and short renderings avoid the system call for CPU time.
    """

    __slots__ = ("_deadline", "_late_at", "_limit_s", "_steps")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._late_at = time.monotonic() + limit_s
        self._deadline: float | None = None  # in CPU time, set when the wall-clock limit has passed
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if not self._steps % STEPS_BETWEEN_LOOKS and time.monotonic() > self._late_at:
            self._look()

    def _look(self) -> None:
        if self._deadline is None:
            self._deadline = time.thread_time() + self._limit_s
        elif time.thread_time() > self._deadline:
            raise TemplateTooLong(f"rendering took more than {self._limit_s:g} s of CPU time")


class GenerationBlocks(Extension):
    """Renders only the body of `{% generation %}`, which marks answers for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # The block is called like a macro, so that variables set inside are not visible outside.
        return nodes.CallBlock(self.call_method("rendered"), [], [], body).set_lineno(line)

    def rendered(self, caller: Callable[[], str]) -> str:
        return caller()


class _Instrumented(NodeTransformer):
    """Makes loops count their turns, and checks the length of the results of `+`, `~` and blocks.

    Of nested `+` operators only the outermost is checked: the template's text bounds the number of operands.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, COUNTED)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, SIZED, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(node, SIZED)

    def visit_Add(self, node: nodes.Add) -> nodes.Filter:
        self._visit_operands(node)
        return _filtered(node, SIZED)

    def _visit_operands(self, node: nodes.Add) -> None:
        for side in ("left", "right"):
            operand = getattr(node, side)
            if isinstance(operand, nodes.Add):
                self._visit_operands(operand)
            else:
                setattr(node, side, self.visit(operand))


def _filtered(node: nodes.Node | None, name: str, line: int = 0) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno if node is not None else line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Threads may share a sandbox, because each rendering's context has its own budget."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"])
        self.filters |= {"tojson": _to_json, COUNTED: _counted, SIZED: _sized}
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda pattern: datetime.now().strftime(pattern),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        instrumented: nodes.Template = _Instrumented().visit(parsed)
        return instrumented

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Skip Jinja's checks where they always pass."""
        if type(obj) is dict and attribute not in DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in PLAIN_STR_METHODS:
            return getattr(obj, attribute)
        if type(obj) is LoopContext and attribute in LOOP_NAMES:
            return getattr(obj, attribute)
        if type(obj) is _Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, None)
            return super().getattr(obj, attribute) if value is None else value
        return super().getattr(obj, attribute)

    def call(__self: TemplateSandbox, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        __context.parent[BUDGET].step()
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            kwargs.pop("_loop_vars", None)  # added by Jinja for functions that take the context
            kwargs.pop("_block_vars", None)
            return _sized(__obj(*args, **kwargs))
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limit = MAX_EXPONENT if operator == "**" else MAX_NUMBER
        if max(abs(_number(left)), abs(_number(right))) > limit:
            raise TemplateTooLong("a number is too large")
        _check_length(max(_length(left) * _number(right), _length(right) * _number(left)))
        return self.binop_table[operator](left, right)


@jinja2.pass_context
def _counted(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    step = context.parent[BUDGET].step
    for item in iterable:
        step()
        yield item


def _sized(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


def _check_length(length: float) -> None:
    if length > MAX_TEXT:
        raise TemplateTooLong(f"a text or list grows above {MAX_TEXT} entries")


def _refuse(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON, because Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """The template's `dict(...)`, with no attribute except `fromkeys`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Refuses names with a leading underscore, which Python uses for its own attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may use `self` as a name
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}")
