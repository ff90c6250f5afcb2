"""Draws mutants with a wrong argument: the right check of the wrong thing. Of made-up protocol bugs, these are the ones
that tests missed, where removed checks were noticed.

    part       a compared or returned tuple (a key) lacks one of its parts, on both sides
    other      another attribute of the same object, with the same type
    swapped    two arguments of a call change places; the callee gives both the same type
    first      an index becomes 0; a loop sees only the first of its items
    less       one of several joined collections is left out
    older      max becomes min, any becomes all

Only the standard library, no tests: `sampled.py --arguments` tries what is drawn here.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

OPPOSITES = {"max": "min", "min": "max", "any": "all", "all": "any"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
KEY_METHODS = frozenset({"get", "pop", "add", "discard", "remove", "setdefault"})
TYPES = frozenset({"dict", "list", "set", "tuple", "defaultdict", "Counter"})  # `dict[str, int]()`
PLAIN = frozenset({"int", "float", "str", "bool", "bytes"})  # attributes of these are seldom alike: `other` needs more
SILENT_CALLS = (".debug", ".info", ".warning", ".error", "Field", "option", "isinstance", "Meta")


@dataclass(frozen=True)
class Change:
    """Replace the source of expressions by other texts."""

    kind: str
    edits: tuple[tuple[ast.expr, str], ...]


def single(kind: str, node: ast.expr, text: str) -> Change:
    return Change(kind, ((node, text),))


@dataclass(frozen=True)
class Signatures:
    """`types`: annotations of the positional parameters, by the name of a function or class that is defined once.
    `fields`: annotations of attributes, by the name of their class."""

    types: Mapping[str, Sequence[str]]
    fields: Mapping[str, Mapping[str, str]]


def read_signatures(sources: Sequence[str]) -> Signatures:
    types: dict[str, list[Sequence[str]]] = defaultdict(list)
    fields: dict[str, dict[str, str]] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, FUNCTIONS):
                types[node.name].append(
                    [_text(arg.annotation) for arg in node.args.args if arg.arg not in ("self", "cls")]
                )
            elif isinstance(node, ast.ClassDef):
                fields[node.name] = _fields(node)
                stored = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                if stored and "__init__" not in {getattr(one, "name", "") for one in node.body}:
                    types[node.name].append([_text(one.annotation) for one in stored])
    return Signatures({name: found[0] for name, found in types.items() if len(found) == 1}, fields)


def _fields(node: ast.ClassDef) -> dict[str, str]:
    """Annotated attributes, and those that __init__ takes over from an annotated parameter."""
    found = {}
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name | ast.Attribute):
            name = part.target.id if isinstance(part.target, ast.Name) else part.target.attr
            found[name] = _text(part.annotation)
        elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
            found |= _taken_over(part)
    return found


def _taken_over(init: ast.FunctionDef) -> dict[str, str]:
    given = {arg.arg: _text(arg.annotation) for arg in init.args.args}
    stored = {}
    for part in ast.walk(init):
        if (
            isinstance(part, ast.Assign)
            and isinstance(part.value, ast.Name)
            and isinstance(part.targets[0], ast.Attribute)
        ):
            stored[part.targets[0].attr] = given.get(part.value.id, "")
    return stored


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def changes(tree: ast.Module, signatures: Signatures) -> Iterator[Change]:
    """Every change that is possible in a file."""
    found = list(_expressions(tree))
    for scope, node in found:
        yield from _of_node(node, signatures.fields.get(scope, {}), signatures.types)
    yield from _keys_without_part([node for _, node in found])
    yield from _first_of_loops(tree)


def _expressions(tree: ast.AST, scope: str = "", inside: bool = False) -> Iterator[tuple[str, ast.expr]]:
    """Expressions of functions, each with the name of the class around it. No annotations, logs or messages."""
    for child in _seen_children(tree):
        if isinstance(child, ast.expr) and inside:
            yield scope, child
        name = child.name if isinstance(child, ast.ClassDef) else scope
        yield from _expressions(child, name, inside or isinstance(child, FUNCTIONS))


def _seen_children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(SILENT_CALLS):
        return
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        yield from node.body
    elif isinstance(node, ast.AnnAssign):
        yield from [node.value] if node.value is not None else []
    else:
        yield from ast.iter_child_nodes(node)


def _of_node(node: ast.expr, fields: Mapping[str, str], types: Mapping[str, Sequence[str]]) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        yield from _without_part(node)
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _text(node.value) == "self":
        yield from _other_attribute(node, fields)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        if isinstance(node.slice, ast.Name | ast.UnaryOp) and _text(node.value) not in TYPES:
            yield single("first", node, f"{_text(node.value)}[0]")
    elif isinstance(node, ast.List | ast.Tuple):
        yield from _one_less(node)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.BitOr):
        yield single("less", node, _text(node.left))
        yield single("less", node, _text(node.right))
    elif isinstance(node, ast.Call):
        yield from _of_call(node, types)


def _without_part(node: ast.Compare) -> Iterator[Change]:
    left, right = node.left, node.comparators[0]
    if not isinstance(left, ast.Tuple) or not isinstance(right, ast.Tuple) or len(left.elts) != len(right.elts):
        return
    for index in range(len(left.elts)):
        both = [ast.Tuple([*side.elts[:index], *side.elts[index + 1 :]], ast.Load()) for side in (left, right)]
        yield single("part", node, _text(ast.Compare(both[0], node.ops, [both[1]])))


def _one_less(node: ast.List | ast.Tuple) -> Iterator[Change]:
    joined = [index for index, part in enumerate(node.elts) if isinstance(part, ast.Starred)]
    for index in joined if len(joined) > 1 else []:
        yield single("less", node, _text(type(node)([*node.elts[:index], *node.elts[index + 1 :]], ast.Load())))


def _keys_without_part(nodes: Sequence[ast.expr]) -> Iterator[Change]:
    """The tuples by which a file looks into one collection all lack the same part."""
    keys: dict[tuple[str, int], list[ast.Tuple]] = defaultdict(list)
    for node in nodes:
        for collection, key in _looked_up(node):
            if isinstance(key, ast.Tuple) and len(key.elts) > 1 and ":" not in _text(key):
                keys[_text(collection), len(key.elts)].append(key)
    for (_, size), tuples in keys.items():
        for index in range(size):
            texts = [_text(ast.Tuple([*key.elts[:index], *key.elts[index + 1 :]], ast.Load())) for key in tuples]
            yield Change("part", tuple(zip(tuples, texts, strict=True)))


def _looked_up(node: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Subscript) and _text(node.value) not in TYPES:
        yield node.value, node.slice
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        yield node.comparators[0], node.left
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEY_METHODS:
        yield from ((node.func.value, arg) for arg in node.args[:1])


def _other_attribute(node: ast.Attribute, fields: Mapping[str, str]) -> Iterator[Change]:
    own = fields.get(node.attr, "")
    if own and own not in PLAIN:
        for name, annotation in fields.items():
            if annotation == own and name != node.attr:
                yield single("other", node, f"self.{name}")


def _of_call(node: ast.Call, types: Mapping[str, Sequence[str]]) -> Iterator[Change]:
    name = _text(node.func).rpartition(".")[2]
    if name in OPPOSITES and isinstance(node.func, ast.Name):
        yield single("older", node, _text(ast.Call(ast.Name(OPPOSITES[name], ast.Load()), node.args, node.keywords)))
    expected = types.get(name, ())
    for i, j in itertools.combinations(range(min(len(node.args), len(expected))), 2):
        if expected[i] and expected[i] == expected[j]:
            args = [*node.args]
            args[i], args[j] = args[j], args[i]
            yield single("swapped", node, _text(ast.Call(node.func, args, node.keywords)))


def _first_of_loops(tree: ast.Module) -> Iterator[Change]:
    """One item instead of all."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            yield single("first", node.iter, f"[*{_operand(node.iter)}][:1]")


def _operand(node: ast.expr) -> str:
    return _text(node) if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({_text(node)})"


def applied(source: str, change: Change) -> str:
    """The whole file with the change in it. Columns of `ast` count bytes."""
    lines = source.encode().splitlines(keepends=True)
    for node, text in sorted(change.edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [head + f"({text})".encode() + tail]
    return b"".join(lines).decode()


def draw(sources: Mapping[str, str], signatures: Signatures, rng: random.Random) -> Iterator[tuple[str, Change]]:
    """(file, change) in an order that `rng` decides: kinds take turns, and an expression is changed once."""
    of_kind: dict[str, list[tuple[str, Change]]] = defaultdict(list)
    for file, source in sources.items():
        at: dict[tuple[int, int, int], list[Change]] = defaultdict(list)
        for change in changes(ast.parse(source), signatures):
            node, text = change.edits[0]
            if text != _text(node):
                at[node.lineno, node.col_offset, node.end_col_offset or 0].append(change)
        for _, found in sorted(at.items()):
            change = rng.choice(found)
            of_kind[change.kind].append((file, change))
    for found in of_kind.values():
        rng.shuffle(found)
    for turn in itertools.zip_longest(*(of_kind[kind] for kind in sorted(of_kind))):
        yield from (drawn for drawn in turn if drawn is not None)
