"""Turns messages into bytes and back, with a limit on every size.

`msgpack` reads the kind of a message. `msgspec` then checks each field's type and range while it reads, and skips
fields of newer versions (versions.py). So it builds only objects that this kind has. Malformed bytes raise only
WireError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args, overload

import msgpack
import msgspec

from shared.core.errors import WireError
from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import (
    AnyMessage,
    CacheEvents,
    Generate,
    Key,
    Message,
    Offer,
    Prebuilt,
    Pull,
    Ready,
    Scores,
    Spending,
    Tokens,
)
from shared.wire.ranges import MAX_DRAFT_BYTES, MAX_SPENDING_BYTES, MAX_TOKENS
from shared.wire.sampling import Sampling, sampling_to_wire
from shared.wire.sampling import sampling_of as sampling_of

MESSAGE_TYPES: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(AnyMessage)}
DECODERS = {kind: msgspec.msgpack.Decoder(kind) for kind in MESSAGE_TYPES.values()}
Buffer = bytes | memoryview
ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class WireLimits:
    """`max_control_bytes` limits the message itself, `max_frame_bytes` each page frame."""

    max_prompt_tokens: int = MAX_TOKENS
    max_control_bytes: int = 12 << 20
    max_frame_bytes: int = 64 << 20
    max_frames: int = 4096


DEFAULT_LIMITS = WireLimits()
AT_ROUTER = WireLimits(max_control_bytes=1 << 20, max_frame_bytes=1 << 20, max_frames=0)
# limits on a decode node's answers
BY_DECODE = WireLimits(max_control_bytes=1 << 20, max_frame_bytes=1 << 20, max_frames=0)
MOST_BYTES = 1 << 20  # for kinds of messages that the next table lacks
MOST_BYTES_OF: dict[type[Message], int] = {  # larger messages are not unpacked
    Tokens: 256 << 10,
    Scores: 256 << 10,
    CacheEvents: 256 << 10,
    Spending: MAX_SPENDING_BYTES + (4 << 10),
    Generate: 12 << 20,
    Offer: 12 << 20,
    Ready: 4 << 20,
    Prebuilt: MAX_DRAFT_BYTES + (1 << 20),
}
HEAD_BYTES = 64  # covers the map's head and the tag
TAG_FIELD = "t"


def encode(message: Message) -> bytes:
    return ENCODER.encode(message)


def decode(data: Buffer, limits: WireLimits = DEFAULT_LIMITS) -> AnyMessage:
    tag = _tag(data)
    kind = MESSAGE_TYPES.get(tag)
    if kind is None:
        raise WireError("a frame that is not one of our messages")
    most = min(limits.max_control_bytes, MOST_BYTES_OF.get(kind, MOST_BYTES))
    if len(data) > most:
        raise WireError(f"{tag}: {len(data)} bytes where {most} are allowed")
    try:
        message = cast(AnyMessage, DECODERS[kind].decode(data))
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"{tag}: {error}") from None
    _check(message, limits)
    return message


def decode_parts(parts: Sequence[Buffer], limits: WireLimits = DEFAULT_LIMITS) -> tuple[AnyMessage, tuple[Buffer, ...]]:
    """Only an inline Ready has frames: one per page."""
    if not parts or len(parts) > limits.max_frames + 1:
        raise WireError(f"{len(parts)} frames where 1 to {limits.max_frames + 1} are allowed")
    message, frames = decode(parts[0], limits), tuple(parts[1:])
    expected = len(message.pages) if isinstance(message, Ready) and message.inline else 0
    if len(frames) != expected:
        raise WireError(f"{type(message).__name__} came with {len(frames)} page frames instead of {expected}")
    if any(len(frame) > limits.max_frame_bytes for frame in frames):
        raise WireError(f"a page frame above {limits.max_frame_bytes} bytes")
    return message, frames


def _tag(data: Buffer) -> str:
    """Return "" if the map's first entry is not a tag."""
    head = msgpack.Unpacker(max_buffer_size=HEAD_BYTES)
    head.feed(bytes(data[:HEAD_BYTES]))
    try:
        head.read_map_header()
        field, tag = head.unpack(), head.unpack()
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return ""
    return tag if field == TAG_FIELD and isinstance(tag, str) else ""


def _check(message: AnyMessage, limits: WireLimits) -> None:
    if isinstance(message, Generate):
        if len(message.output_ids) != message.num_sequences:
            raise WireError(f"Generate: {message.num_sequences} sequences, but {len(message.output_ids)} outputs")
        if len(set(message.ended)) >= message.num_sequences or max(message.ended, default=0) >= message.num_sequences:
            raise WireError(f"Generate: {len(message.ended)} of {message.num_sequences} sequences have ended")
        _check_ids([message.prompt_ids, *message.output_ids], limits)
        sampling_of(message.sampling)
    elif isinstance(message, Offer):
        _check_ids([message.prompt_ids, message.output_ids], limits)
        sampling_of(message.sampling)
    elif isinstance(message, Pull):
        _check_ids([message.prompt_ids], limits)
        if message.first_page >= message.num_pages:
            raise WireError(f"Pull: of {message.num_pages} pages, page {message.first_page} is the first wanted")
    elif isinstance(message, Ready):
        if not len(message.pages) == len(message.generations) == len(message.digests):
            raise WireError("Ready: pages, generations and digests differ in number")
        routes = (message.inline, message.pool is not None, bool(message.handle), message.staged_bytes > 0)
        if routes.count(True) != 1:
            raise WireError("Ready: pages must come in one way: inline, from a pool, through a library, or staged")
    elif isinstance(message, Prebuilt) and message.committed == 0:
        raise WireError("Prebuilt: no committed tokens")


def _check_ids(lists: list[list[int]], limits: WireLimits) -> None:
    if not lists[0]:
        raise WireError("an empty prompt")
    if sum(map(len, lists)) > limits.max_prompt_tokens:
        raise WireError(f"{sum(map(len, lists))} tokens where {limits.max_prompt_tokens} are allowed")


def key_of(key: Key) -> RequestKey:
    return RequestKey(key.router_id, key.router_epoch, key.rid, key.attempt, key.seq_index)


@overload
def to_wire(value: RequestKey) -> Key: ...
@overload
def to_wire(value: SamplingParams) -> Sampling: ...
def to_wire(value: RequestKey | SamplingParams) -> Key | Sampling:
    return Key(*value) if isinstance(value, RequestKey) else sampling_to_wire(value)
