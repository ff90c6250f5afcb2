"""The base of messages, and parts that several messages share or that report tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.core.sampling_params import MAX_TOP_LOGPROBS
from shared.wire.ranges import MAX_RUNS, MAX_TAKEN, Count, Milliseconds, Name, Real, Text, TokenId, Unsigned


class Message(msgspec.Struct, frozen=True, tag_field="t"):
    """A message's tag is its class name."""


class Key(msgspec.Struct, frozen=True, array_like=True):
    """`core.keys.RequestKey` on the wire."""

    router_id: Name
    router_epoch: Unsigned
    rid: Name
    attempt: Count
    seq_index: Count


class PoolRef(msgspec.Struct, frozen=True):
    """The address of a KV pool on the same host.

    A peer opens P's pool read-only as /proc/<pid>/fd/<fd>, and compares these sizes with the file's size."""

    pid: Count
    fd: Count
    num_pages: Count
    page_bytes: Count
    nonce: Unsigned  # also stored in the pool, to detect a recycled pid


class OthersLoad(msgspec.Struct, frozen=True, array_like=True):
    """A part of Heartbeat: the load that all routers, except the receiver of this message, put on the node."""

    routers: Count  # routers with requests on this node
    sequences: Count  # running and waiting sequences
    pages: Count
    waiting_tokens: Count


NO_OTHERS = OthersLoad(0, 0, 0, 0)


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """A part of Heartbeat: what the node has read on this connection to the receiver.

    Connections keep the order, so a Generate that was sent before that Welcome, and that no heartbeat has listed, will
    never come."""

    clock_ms: Milliseconds  # of the newest Welcome; 0: the node does not tell
    keys: Annotated[list[Key], Meta(max_length=MAX_TAKEN)]  # of the Generates taken or refused since the last heartbeat


NOTHING_TAKEN = Taken(0, [])


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probabilities of a token and of the likeliest tokens in its place."""

    logprob: Real
    top_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOP_LOGPROBS)]
    top_logprobs: Annotated[tuple[Real, ...], Meta(max_length=MAX_TOP_LOGPROBS)]


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one sequence. first_pos is the first token's position in the sequence's output, from 0."""

    key: Key
    first_pos: Count
    ids: Annotated[list[TokenId], Meta(max_length=MAX_RUNS)]
    logprobs: Annotated[list[TokenLogprob], Meta(max_length=MAX_RUNS)]  # empty unless the request wants them


class SequenceEnd(msgspec.Struct, frozen=True, array_like=True):
    key: Key
    reason: Text  # a core.states.FinishReason
    num_output_tokens: Count
    cached_tokens: Count
    error_code: Text  # a code of wire/errors.py; "" unless `reason` is "error"
    error_message: Text
