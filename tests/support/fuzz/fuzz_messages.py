"""Messages for fuzzing: valid by the schema with any values in them, some of them heard elsewhere, and bytes that were
valid once. Knows nothing of sockets."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import msgspec

from shared.core.errors import WireError
from shared.wire.codec import MESSAGE_TYPES, decode, encode
from shared.wire.messages import Message
from shared.wire.ranges import MAX_REAL
from tests.support.wire.wire_samples import MESSAGES

inspect = msgspec.inspect
KINDS = tuple(MESSAGE_TYPES)
TEXTS = ("", "a", "prefill", "decode", "shm", "zmq", "stop", "length", "error", "handoff_failed", "overloaded",
         "peer_unreachable", "nobody", "tcp://127.0.0.1:1", "tcp://10.0.0.1:1", "ipc:///tmp/x", "free", "steps",
         "\u2028 \n")  # fmt: skip
MOST_ITEMS = 40
PLAUSIBLE = 0.75  # how often a field takes a value that was heard under its name
MAX_HEARD = 200
FRAMES = (b"", b"x", bytes(64), bytes(4096))


class MessageSource:
    """Draws from `rng` alone, so that a seed gives the same messages for the same things heard."""

    def __init__(self, rng: random.Random, own: dict[str, Any]) -> None:
        """own: what it says of itself by field name; it seldom lies about it, for who lies is not listened to."""
        self._rng = rng
        self._own = own
        self._heard: defaultdict[str, list[Any]] = defaultdict(list)
        for message in MESSAGES:
            self.hear(message)

    def hear(self, message: Any) -> None:
        """Keeps keys, leases, endpoints and so on, to be said again."""
        for name in message.__struct_fields__:
            value = getattr(message, name)
            kept = self._heard[name]
            kept.append(value)
            if len(kept) > MAX_HEARD:
                kept.pop(self._rng.randrange(MAX_HEARD))
            if isinstance(value, msgspec.Struct):
                self.hear(value)

    def message(self, kind: str) -> Message:
        """Passes the codec, or nearly: a few rules are not in the schema."""
        return self._struct(inspect.type_info(MESSAGE_TYPES[kind]), top=True)  # type: ignore[no-any-return]

    def parts(self) -> list[bytes]:
        """One message as it goes over the wire, one in three broken."""
        rng = self._rng
        data = encode(self.message(rng.choice(KINDS)))
        if rng.random() < 0.3:
            data = self.broken(data)
        num_frames = self._frames_of(data) if rng.random() < 0.9 else rng.randrange(4)
        return [data, *(rng.choice(FRAMES) for _ in range(num_frames))]

    def _frames_of(self, data: bytes) -> int:
        """As many page frames as the message says, so that it gets further."""
        try:
            message = decode(data)
        except WireError:
            return 0
        return min(len(message.pages), MOST_ITEMS) if getattr(message, "inline", False) else 0  # type: ignore[union-attr]

    def broken(self, data: bytes) -> bytes:
        rng, out = self._rng, bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            place = rng.randrange(len(out)) if out else 0
            change = rng.randrange(5)
            if change == 0 and out:
                out[place] = rng.randrange(256)
            elif change == 1:
                del out[place : place + rng.randrange(1, 9)]
            elif change == 2:
                out[place:place] = rng.randbytes(rng.randrange(1, 9))
            elif change == 3:
                out[place:place] = rng.choice(
                    [b"\xdd\xff\xff\xff\xff", b"\xdf\x00\x10\x00\x00", b"\x91" * 600, b"\xc1"]
                )
            else:
                out = out[:place]
        return bytes(out)

    # ---- values by type

    def _value(self, kind: Any, name: str) -> Any:
        if isinstance(kind, inspect.Metadata):
            kind = kind.type
        heard = self._heard[name]
        if heard and self._rng.random() < PLAUSIBLE:
            return self._rng.choice(heard)
        return self._fresh(kind, name)

    def _struct(self, kind: Any, *, top: bool = False) -> Any:
        fields = {}
        for field in kind.fields:
            lies = self._rng.random() < 0.02
            fields[field.name] = self._own[field.name] if top and field.name in self._own and not lies else None
            if fields[field.name] is None:
                fields[field.name] = self._value(field.type, field.name)
        return kind.cls(**fields)

    def _fresh(self, kind: Any, name: str) -> Any:
        rng = self._rng
        if isinstance(kind, inspect.StructType):
            return self._struct(kind)
        if isinstance(kind, inspect.UnionType):
            return self._value(rng.choice(kind.types), f"{name}?")
        if isinstance(kind, inspect.ListType):
            return [self._value(kind.item_type, f"{name}[]") for _ in range(self._count(kind.max_length))]
        if isinstance(kind, inspect.TupleType):
            return tuple(self._value(item, f"{name}[]") for item in kind.item_types)
        if isinstance(kind, inspect.DictType):
            keys = [self._text(1, 64) for _ in range(self._count(kind.max_length))]
            return {key: self._value(kind.value_type, f"{name}[]") for key in keys}
        return self._scalar(kind)

    def _scalar(self, kind: Any) -> Any:
        rng = self._rng
        if isinstance(kind, inspect.IntType):
            return self._int(kind)
        if isinstance(kind, inspect.FloatType):
            return rng.choice([0.0, 1.0, -1.0, 0.5, MAX_REAL, -MAX_REAL, 1e-30, rng.uniform(-10, 10)])
        if isinstance(kind, inspect.StrType):
            return self._text(kind.min_length or 0, kind.max_length)
        if isinstance(kind, inspect.BytesType):
            return rng.randbytes(rng.choice([0, 1, 8, 600]))
        if isinstance(kind, inspect.LiteralType):
            return rng.choice(kind.values)
        return rng.random() < 0.5 if isinstance(kind, inspect.BoolType) else None

    def _int(self, kind: Any) -> int:
        low = kind.ge if kind.ge is not None else -(1 << 63)
        high = kind.le if kind.le is not None else (kind.lt if kind.lt is not None else 1 << 64) - 1
        drawn = self._rng.choice([low, high, 0, 1, 2, self._rng.randrange(100), self._rng.randint(low, high)])
        return max(low, min(high, drawn))

    def _text(self, low: int, high: int) -> str:
        text = self._rng.choice(TEXTS) if self._rng.random() < 0.9 else "y" * self._rng.choice([1, 300, high])
        return text[:high] or "z" * low

    def _count(self, most: int) -> int:
        return min(most, self._rng.choice([0, 1, 1, 2, 3, MOST_ITEMS]))
