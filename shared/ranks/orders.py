"""Define the messages between rank 0 and the other ranks: a length, then msgpack, over one socket pair per rank.

    rank 0   Start                 Pages, and their descriptor    Forward, Forward, ...   (closes)
    rank 1       Done (loading)                          Done

On GPUs there is no descriptor, and rank 0 first measures the largest step with few pages:

    rank 0   Start                 Pages        Forward, ...  Measure         Pages        Forward, ...   (closes)
    rank 1       Done (loading)           Done                        RankUse         Done

From then on rank 0 may also send ReadPages, which PageBytes answers, and WritePage.

Each end leaves by closing the socket.
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
    """The model to load, and the file through which the ranks find each other."""

    rank: int
    size: int
    is_dp: bool  # False: tp
    device: str  # where all ranks compute: "cpu", or each rank's own GPU
    store: str  # path of the file through which ranks find each other; only this user can read it
    model: str
    dtype: str
    kv_dtype: str
    weight_dtype: str
    library: str  # --model-library
    max_context: int
    packed_bytes: int  # size limit of the folder of packed weights
    adapters: dict[str, str]  # adapter name -> LoRA folder
    load_s: float  # seconds that ranks wait for each other while loading
    silence_s: float  # seconds that ranks wait for each other after loading


class Pages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The node's KV memory. One byte follows, with the memory's file descriptor, unless each rank has own pages."""

    num_pages: int
    page_size: int
    page_bytes: int


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A follower's answer to Start, sent before the follower loads the model, and its answer to Pages."""


class Forward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    inputs: bytes  # a `model.interface.ModelInputs` (tp.py), here in bytes because this module loads no torch
    num_numbers: int = 0  # of its tensors on the device, which follow through the group


class ReadPages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Asks for the byte range [start, stop) of each page, which PageBytes brings."""

    pages: list[int]
    start: int
    stop: int


class PageBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: bytes  # page after page


class WritePage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The bytes of a page from `start` on. Nothing answers."""

    page: int
    start: int
    data: bytes


class Measure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Asks what the forwards so far took of the rank's GPU."""


class RankUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to Measure: GpuUse (shared/node/assembly/gpu_memory.py) of the rank's GPU."""

    total: int
    free: int
    weights: int
    largest_step: int


DeviceOrder = Pages | Forward | Measure | ReadPages | WritePage


def tell(peer: socket.socket, message: msgspec.Struct) -> None:
    """Send a message, blocking up to the socket's timeout. Raises RankLost if the peer is gone."""
    data = msgspec.msgpack.encode(message)
    try:
        peer.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    except OSError as error:
        raise RankLost(f"another rank of this node takes no messages: {error}") from error


def hear(peer: socket.socket, kind: type[Order]) -> Order | None:
    """Return the next message, or None if the peer has closed the socket or is silent until the socket's timeout."""
    data = hear_data(peer)
    return msgspec.msgpack.decode(data, type=kind) if data else None


def hear_order(peer: socket.socket) -> DeviceOrder | None:
    """Return rank 0's next order to a rank on a GPU, or None as `hear`."""
    data = hear_data(peer)
    return msgspec.msgpack.decode(data, type=DeviceOrder) if data else None


def hear_data(peer: socket.socket) -> bytes | None:
    with contextlib.suppress(OSError):
        head = read_exactly(peer, LENGTH_BYTES)
        return read_exactly(peer, int.from_bytes(head, "little")) if head else None
    return None


def read_exactly(peer: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = peer.recv(min(count, READ_BYTES))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
