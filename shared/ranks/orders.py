"""What rank 0 of a node says to the other ranks, over a socket pair that it made for each of them: msgpack behind a
length. Both ends are processes of one node, started by one another. The socket's closing is the one way to part.

    rank 0   Start                 Pages, and their descriptor    Forward, Forward, ...   (closes)
    rank 1       Done (loading)                          Done

Knows nothing of what is done with it.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TypeVar

import msgspec

from shared.core.errors import RankLost

LENGTH_BYTES = 8
READ_BYTES = 1 << 20
Order = TypeVar("Order", bound=msgspec.Struct)


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model to load, and where the ranks find one another."""

    rank: int
    size: int
    is_dp: bool  # each rank has the whole model, and some rows of each step; else a part of the model
    store: str  # a file that only this user reads
    model: str
    dtype: str
    kv_dtype: str
    weight_dtype: str
    max_context: int
    packed_bytes: int  # most bytes of the folder of packed weights
    adapters: dict[str, str]  # LoRA folders by name
    load_s: float  # how long ranks may wait for one another until all are ready
    silence_s: float  # and from then on


class Pages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The node's KV memory; its descriptor comes beside the next byte."""

    num_pages: int
    page_size: int
    page_bytes: int


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A follower's answer to Start, when it is about to load, and to Pages."""


class Forward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a forward reads: `model.interface.ModelInputs`, tensors as bytes in the dtypes written there."""

    input_ids: bytes
    positions: bytes
    cu_q_lens: bytes
    page_table: bytes  # row by row, each of
    num_pages: int
    logits_idx: bytes
    max_q_len: int
    max_seq_len: int
    slots: bytes | None
    visible: bytes | None
    adapters: bytes | None
    encoder_lens: bytes | None


def tell(peer: socket.socket, message: msgspec.Struct) -> None:
    """Waits until the peer has read what went before, at most the socket's timeout. RankLost when it is gone."""
    data = msgspec.msgpack.encode(message)
    try:
        peer.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    except OSError as error:
        raise RankLost(f"another rank of this node takes no messages: {error}") from error


def hear(peer: socket.socket, kind: type[Order]) -> Order | None:
    """The next message, waited for as long as the socket's timeout says; None when the peer has parted, or is late."""
    with contextlib.suppress(OSError):
        head = read_exactly(peer, LENGTH_BYTES)
        data = read_exactly(peer, int.from_bytes(head, "little")) if head else None
        return msgspec.msgpack.decode(data, type=kind) if data else None
    return None


def read_exactly(peer: socket.socket, count: int) -> bytes | None:
    """None when the peer parts before that."""
    parts: list[bytes] = []
    while count:
        part = peer.recv(min(count, READ_BYTES))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
