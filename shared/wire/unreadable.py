"""A router's Generate that can't be decoded: of another version, cut, or malformed behind its key."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import msgspec

from shared.core.errors import WireError
from shared.wire.codec import TAG_FIELD, Buffer
from shared.wire.messages import Generate, Key

KEY_BYTES = 4096  # covers the head with the longest key


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The router waits for an answer."""

    peer: str
    key: Key
    error: WireError


def unreadable(peer: str, data: Buffer, error: WireError) -> list[Unreadable]:
    """Return nothing for other messages, or if the key can't be read either."""
    key = _key_of(data)
    return [] if key is None else [Unreadable(peer, key, error)]


def _key_of(data: Buffer) -> Key | None:
    head = msgpack.Unpacker(max_buffer_size=KEY_BYTES)
    head.feed(bytes(data[:KEY_BYTES]))
    try:
        head.read_map_header()
        if [head.unpack() for _ in range(3)] != [TAG_FIELD, Generate.__name__, "key"]:
            return None
        return msgspec.convert(head.unpack(), Key)
    except (msgspec.MsgspecError, ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return None
