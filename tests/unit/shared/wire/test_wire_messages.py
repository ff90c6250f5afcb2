"""The schema's own promises, with the numbers that both ends must agree on: what is frozen, what is just allowed.

One beyond each limit, whatever it is: test_wire_limits.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import msgspec
import pytest

from shared.wire import messages, parts, sampling
from shared.wire.codec import encode
from tests.support.wire.wire_samples import MESSAGES, REMOTE

STORE_ENTRY, PREBUILT, SPENDING = (
    next(message for message in MESSAGES if type(message).__name__ == name)
    for name in ("StoreEntry", "Prebuilt", "Spending")
)


@pytest.fixture
def schema(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The schema as its files are now: sampled mutants (tests/mutants) change no class that is loaded already."""
    module = ModuleType("schema_read_anew")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for part in (messages, parts, sampling):
        path = Path(str(part.__file__))
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def test_every_message_and_what_it_holds_is_frozen(schema: ModuleType) -> None:
    """Messages are handed on and kept: nobody changes one under another's hands."""
    kinds = [
        kind
        for kind in vars(schema).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == schema.__name__
    ]
    assert len(kinds) > 30 and schema.TokenRun in kinds
    assert [kind.__name__ for kind in kinds if not kind.__struct_config__.frozen] == []


def refuses(kind: Any, value: object) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return True
    return False


@pytest.mark.parametrize(
    ("name", "allowed", "beyond"),
    [
        ("TokenId", (0, 2147483647), (-1, 2147483648)),
        ("Int32", (-2147483648, 2147483647), (-2147483649, 2147483648)),
        ("Count", (0, 9007199254740991), (-1, 9007199254740992)),
        ("Milliseconds", (0, 1_000_000_000_000), (-1, 1_000_000_000_001)),
        ("Unsigned", (0, 18446744073709551615), (-1,)),
        ("Real", (-3.4028234e38, 0.0, 3.4028234e38), (-3.4028236e38, 3.4028236e38)),
        ("Name", ("x", "x" * 256), ("", "x" * 257)),
        ("Text", ("", "x" * 16384), ("x" * 16385,)),
        ("BadWord", ([1], [1] * 32), ([], [1] * 33)),
        ("PageName", (b"x" * 16,), (b"x" * 15, b"x" * 17)),
        ("Transports", ([], ["zmq"] * 16), (["zmq"] * 17,)),
    ],
)
def test_what_is_at_a_limit_is_taken_and_one_beyond_is_not(
    schema: ModuleType, name: str, allowed: tuple[object, ...], beyond: tuple[object, ...]
) -> None:
    kind = getattr(schema, name)
    assert [value for value in allowed if refuses(kind, value)] == []
    assert [value for value in beyond if not refuses(kind, value)] == []


@pytest.mark.parametrize(
    ("message", "field", "num_bytes"),
    [
        (REMOTE, "handle", 65536),
        (STORE_ENTRY, "value", 65536),
        (PREBUILT, "draft_state", 4194304),
        (SPENDING, "body", 65536),
    ],
    ids=["handle", "value", "draft_state", "body"],
)
def test_so_many_bytes_are_taken_and_one_more_is_not(
    schema: ModuleType, message: messages.Message, field: str, num_bytes: int
) -> None:
    fields, kind = msgpack.unpackb(encode(message)), getattr(schema, type(message).__name__)
    assert not refuses(kind, fields | {field: bytes(num_bytes)})
    assert refuses(kind, fields | {field: bytes(num_bytes + 1)})


def test_lists_and_maps_have_room_for_what_both_ends_may_send(schema: ModuleType) -> None:
    most = {"MAX_SEQUENCES": 128, "MAX_TOKENS": 1048576, "MAX_RUNS": 16384, "MAX_NAMES": 256, "MAX_SCORES": 8192}
    assert {name: getattr(schema, name) for name in most} == most
