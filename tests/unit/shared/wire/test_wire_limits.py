"""Every field of every message has a limit: the schema says so, and one beyond it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import msgspec
import pytest

from shared.core.errors import WireError
from shared.wire.codec import MESSAGE_TYPES, decode, encode
from shared.wire.ranges import MAX_REAL, MAX_RUNS
from tests.support.wire.wire_samples import MESSAGES

inspect = msgspec.inspect
Path = tuple[Any, ...]  # names, indices and map keys from the message down to a value
BIT_LIMITED = {"bits": 64}


def test_the_samples_reach_every_message() -> None:
    assert {type(message).__name__ for message in MESSAGES} == set(MESSAGE_TYPES)


@dataclass(frozen=True)
class Leaf:
    """One place in a message's schema. `marks`: what the annotation carries beyond a range."""

    path: Path
    type: inspect.Type
    marks: tuple[object, ...] = ()


def leaves(kind: inspect.Type, path: Path = (), marks: tuple[object, ...] = ()) -> Iterator[Leaf]:
    """Every value and every container, with names for fields, 0 for what a list holds, "key" and "value" for maps."""
    if isinstance(kind, inspect.Metadata):
        yield from leaves(kind.type, path, (*marks, kind.extra))
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from leaves(field.type, (*path, field.name))
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from leaves(one, path, marks)
    else:
        yield Leaf(path, kind, marks)
        if isinstance(kind, SEQUENCES):
            yield from leaves(kind.item_type, (*path, 0))
        elif isinstance(kind, inspect.TupleType):
            for i, item in enumerate(kind.item_types):
                yield from leaves(item, (*path, i))
        elif isinstance(kind, inspect.DictType):
            yield from leaves(kind.key_type, (*path, "key"))
            yield from leaves(kind.value_type, (*path, "value"))


SEQUENCES = inspect.ListType | inspect.VarTupleType
ALWAYS_LIMITED = (inspect.BoolType, inspect.NoneType, inspect.LiteralType, inspect.TupleType)


def is_limited(leaf: Leaf) -> bool:
    kind = leaf.type
    if isinstance(kind, inspect.IntType):
        low = kind.ge is not None or kind.gt is not None
        high = kind.le is not None or kind.lt is not None
        return low and (high or BIT_LIMITED in leaf.marks)
    if isinstance(kind, inspect.FloatType):
        return kind.ge is not None and kind.le is not None
    if isinstance(
        kind, inspect.StrType | inspect.BytesType | inspect.ListType | inspect.VarTupleType | inspect.DictType
    ):
        return kind.max_length is not None
    return isinstance(kind, ALWAYS_LIMITED)


@pytest.mark.parametrize("name", MESSAGE_TYPES)
def test_every_field_is_limited(name: str) -> None:
    found = list(leaves(inspect.type_info(MESSAGE_TYPES[name])))
    assert found and [leaf.path for leaf in found if not is_limited(leaf)] == []


def test_the_walk_sees_what_has_no_limit() -> None:
    class Open(msgspec.Struct):
        text: str
        number: int
        inner: list[dict[str, float]]

    missing = [leaf.path for leaf in leaves(inspect.type_info(Open)) if not is_limited(leaf)]
    assert missing == [("text",), ("number",), ("inner",), ("inner", 0), ("inner", 0, "key"), ("inner", 0, "value")]


def beyond(leaf: Leaf) -> list[Any]:
    """Values that are of the right kind and too large, too small, or none at all."""
    kind = leaf.type
    if isinstance(kind, inspect.IntType):
        low = kind.ge if kind.ge is not None else 0
        high = kind.lt if kind.lt is not None else None if kind.le is None else kind.le + 1
        return [low - 1] + ([high] if high is not None else [])
    if isinstance(kind, inspect.FloatType):
        return [math.nan, math.inf, -math.inf, 1.1 * MAX_REAL]
    if isinstance(kind, inspect.StrType):
        return ["x" * (kind.max_length + 1)]  # type: ignore[operator]
    if isinstance(kind, inspect.BytesType):
        return [bytes(kind.max_length + 1)]  # type: ignore[operator]
    return []


def put(fields: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """The same with one value changed."""
    if not path:
        return change(fields)
    step, rest = path[0], path[1:]
    if step in ("key", "value") and isinstance(fields, dict) and step not in fields:
        key = next(iter(fields))
        if step == "key":
            return {change(key): fields[key]}
        return {**fields, key: put(fields[key], rest, change)}
    copy = fields.copy()
    copy[step] = put(fields[step], rest, change)
    return copy


def tabled(message: Any, path: Path) -> Path:
    """Structs that travel as arrays have positions for names."""
    out: list[Any] = []
    kind: Any = inspect.type_info(type(message))
    for step in path:
        while isinstance(kind, inspect.Metadata):
            kind = kind.type
        if isinstance(kind, inspect.UnionType):
            kind = next(one for one in kind.types if isinstance(one, inspect.StructType))
        if isinstance(kind, inspect.StructType):
            names = [field.encode_name for field in kind.fields]
            out.append(names.index(step) if kind.array_like else step)
            kind = kind.fields[names.index(step)].type
        else:
            out.append(step)
            kind = inner(kind, step)
    return tuple(out)


def inner(kind: Any, step: Any) -> Any:
    if isinstance(kind, inspect.DictType):
        return kind.key_type if step == "key" else kind.value_type
    return kind.item_types[step] if isinstance(kind, inspect.TupleType) else kind.item_type


def container_limit(leaf: Leaf) -> int | None:
    kind = leaf.type
    return kind.max_length if isinstance(kind, inspect.ListType | inspect.DictType) else None


def full(message: Any) -> Any:
    """No list is empty, so that there is something to change in each."""
    name = type(message).__name__
    changes: dict[str, Any] = {"Generate": {"output_ids": [[8], [7]], "ended": [1]}, "Offer": {"output_ids": [3]}}
    return msgspec.structs.replace(message, **changes.get(name, {}))


@pytest.mark.parametrize("message", [full(message) for message in MESSAGES], ids=lambda message: type(message).__name__)
def test_one_beyond_each_limit_is_refused(message: Any) -> None:
    fields = msgpack.unpackb(encode(message))
    assert decode(msgpack.packb(fields)) == message
    for leaf in leaves(inspect.type_info(type(message))):
        if leaf.path[0] == "pool" and message.pool is None:  # the other Ready has one
            continue
        for value in beyond(leaf):
            changed = put(fields, tabled(message, leaf.path), lambda _, value=value: value)
            with pytest.raises(WireError):
                decode(msgpack.packb(changed))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_one_entry_beyond_each_list_and_map_is_refused(message: Any) -> None:
    fields = msgpack.unpackb(encode(message))
    for leaf in leaves(inspect.type_info(type(message))):
        limit = container_limit(leaf)
        if limit is None or len(leaf.path) > 1 and leaf.path[0] in ("runs", "output_ids", "observations", "load"):
            continue
        with pytest.raises(WireError, match=rf"<= {limit}|max_\w+_len|bytes where"):
            decode(msgpack.packb(put(fields, tabled(message, leaf.path), partial(filled, count=limit + 1))))


def filled(value: Any, count: int) -> Any:
    """So many entries like the first one there is, or like a small number."""
    if isinstance(value, dict):
        first = next(iter(value.values()))
        return {f"n{i}": first for i in range(count)}
    return [value[0] if value else 0] * count


def test_lists_within_lists() -> None:
    """Those that the walk above leaves out."""
    heartbeat, tokens, generate = (
        next(m for m in MESSAGES if type(m).__name__ == name) for name in ("Heartbeat", "Tokens", "Generate")
    )
    load, run = heartbeat.load, tokens.runs[0]
    change = msgspec.structs.replace
    for message in (
        change(heartbeat, load=change(load, pages={f"n{i}": 1 for i in range(257)})),
        change(heartbeat, load=change(load, rows={f"n{i}": 1 for i in range(257)})),
        change(heartbeat, load=change(load, counters={f"n{i}": 1.0 for i in range(257)})),
        change(heartbeat, load=change(load, observations={f"n{i}": [] for i in range(257)})),
        change(heartbeat, load=change(load, observations={"n": [1.0] * 513})),
        change(tokens, runs=[run] * (MAX_RUNS + 1)),
        change(tokens, runs=[change(run, ids=[1] * (MAX_RUNS + 1))]),
        change(tokens, runs=[change(run, logprobs=[change(run.logprobs[0], top_ids=[1] * 21)])]),
        change(tokens, runs=[change(run, logprobs=[change(run.logprobs[0], top_logprobs=[1.0] * 21)])]),
        change(generate, output_ids=[[]] * 129),
        change(generate, output_ids=[[1] * ((1 << 20) + 1), []]),
    ):
        with pytest.raises(WireError):
            decode(encode(message))


def test_no_number_has_more_than_64_bits() -> None:
    with pytest.raises(OverflowError):
        msgpack.packb(1 << 64)
    goodbye = replace_epoch((1 << 64) - 1)
    assert decode(encode(goodbye)) == goodbye


def replace_epoch(epoch: int) -> Any:
    sample = next(message for message in MESSAGES if type(message).__name__ == "Goodbye")
    return msgspec.structs.replace(sample, epoch=epoch)
