"""The Jinja environment of chat templates: what Hugging Face's has, in a sandbox, and bounded.

What is bounded: the CPU time of one rendering, checked every few turns of loops and calls, and the length of what
operators, calls and blocks build. What is not: one operation that is long by itself, as a format of enormous width,
padding, or a filter over a huge list. A template is code of the model's author. One that was written to do harm can
still use up memory and time in such an operation. It can't loop for ever, and it can't reach files or other objects.
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

MAX_TEXT = 16 << 20  # characters of one string, entries of one list
MAX_EXPONENT = 1 << 10
MAX_NUMBER = 1 << 1024
STEPS_BETWEEN_LOOKS = 64
BUDGET = "%budget"  # names that no template can write
COUNTED = "%counted"
SIZED = "%sized"
DICT_NAMES = frozenset(dir(dict))
LOOP_NAMES = frozenset(name for name in dir(LoopContext) if name[0] != "_")
PLAIN_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}


class TemplateRefusal(Exception):
    """`raise_exception` of a template: it does not take these messages."""


class TemplateTooLong(Exception):
    """The template used up its time, or built too long a text."""


class Budget:
    """What one rendering may use: `limit_s` by the clock, and from then on as much CPU time of its thread, so that a
    busy machine refuses nobody. To ask for CPU time is a system call, which short renderings are spared."""

    __slots__ = ("_deadline", "_late_at", "_limit_s", "_steps")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._late_at = time.monotonic() + limit_s
        self._deadline: float | None = None  # of CPU time, once it is late
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
    """`{% generation %}` marks an answer for training. It renders as its body does."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a block of its own, as a macro is: what it sets stays inside
        return nodes.CallBlock(self.call_method("rendered"), [], [], body).set_lineno(line)

    def rendered(self, caller: Callable[[], str]) -> str:
        return caller()


class _Instrumented(NodeTransformer):
    """Lets every loop count its turns, and looks at the length of what `+`, `~` and a block build.

    Of nested `+` the outermost is enough: one expression has no more operands than its text.
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
    """Compiles templates. Each rendering brings its own budget in its context, so threads may share one."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"])
        self.filters |= {"tojson": _to_json, COUNTED: _counted, SIZED: _sized}
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        instrumented: nodes.Template = _Instrumented().visit(parsed)
        return instrumented

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Find fields, methods of text, and what loops and namespaces have, without the sandbox's checks, which they
        always pass."""
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
            kwargs.pop("_loop_vars", None)  # what Jinja adds for functions that take the context
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
    """Plain JSON: Jinja's own filter writes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Dict:
    """`dict(...)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Takes no names that begin with an underscore: they are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be one of the names
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
