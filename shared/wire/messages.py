"""Every message between router and nodes, as data. The codec beside this file checks sizes and schema.

    node -> router   Hello, Heartbeat, Begun, Tokens, CacheEvents, Goodbye, Unwelcome
    router -> node   Welcome, Generate, Abort, Drain, CacheReplay
    P -> D           Offer, Ready, Prebuilt, Abort
    D -> P           Grant, Wait, Refuse, Installed, Failed
    D -> P           Join, Take                              transports with a process group per pair
    both             StoreEntry, Broken                      the same

Tensors never travel inside a message: they are separate, length-checked frames (`Ready` and `Prebuilt` say which).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.core.sampling_params import MAX_TOP_LOGPROBS
from shared.observe.node_metrics import MAX_SAMPLES
from shared.wire.ranges import (
    MAX_CODE_BYTES,
    MAX_DRAFT_BYTES,
    MAX_HANDLE_BYTES,
    MAX_NAMES,
    MAX_PAGE_NAMES,
    MAX_RUNS,
    MAX_SCORES,
    MAX_SEQUENCES,
    MAX_STORE_BYTES,
    MAX_TOKENS,
    Count,
    Milliseconds,
    Name,
    PageName,
    Real,
    States,
    Text,
    TokenId,
    TokenIds,
    Transports,
    Unsigned,
)
from shared.wire.sampling import Sampling
from shared.wire.tickets import Ticket

PROTOCOL_VERSION = 10


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of all messages; the tag is the class name."""


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`core.keys.RequestKey` on the wire."""

    router_id: Name
    router_epoch: Unsigned
    rid: Name
    attempt: Count
    seq_index: Count


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two nodes pair only when these fit (shared/wire/fitting.py); a refusal names the field that does not."""

    protocol: Count
    numerics: Count
    model: Text
    weights: Text
    dtype: Text
    page_size: Count
    page_layout: Text  # the planes of a page, in their order
    spec: Text  # what drafts leave in pages and records, with the head's weights
    build: Text
    grammar: Text  # whose masks are alike: llguidance's version and the vocabulary's digest; "none" without grammars


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A LoRA adapter that a node has loaded. Requests and KV name it by its digest, clients by its name."""

    name: Name
    digest: Name


class NodeLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gauges of a node, sent with every heartbeat. Page states partition pages_total, row states rows_total."""

    pages_total: Count
    pages: States  # by PageState
    rows_total: Count
    rows: States  # by RowState
    waiting: Count
    waiting_tokens: Count
    spec_width: Count  # tokens that a running row steps now; 1: no drafts
    # monotone totals since the epoch began (steps, wire errors, idle seconds, ...)
    counters: Annotated[dict[Name, Real], Meta(max_length=MAX_NAMES)]
    # histogram samples since the last heartbeat, by metric name
    observations: Annotated[dict[Name, Annotated[list[Real], Meta(max_length=MAX_SAMPLES)]], Meta(max_length=MAX_NAMES)]
    # a prefill node's: by decode node, the transport and why it is that one
    hands_over: Annotated[dict[Name, Text], Meta(max_length=MAX_NAMES)]
    cores: Text  # those it computes on, and whom it lends them to; empty on a GPU


class Hello(Message, frozen=True):
    role: Text  # "prefill" | "decode"
    node_id: Name
    epoch: Unsigned
    node_endpoint: Text  # where peers dial this node (ROUTER socket)
    fingerprint: Fingerprint
    max_context: Count
    max_running: Count
    host_id: Name  # equal on nodes that can share memory
    transports: Transports
    connection: Count  # the node's count of its connections to this router: equal in a Hello that is said again
    adapters: Annotated[list[Adapter], Meta(max_length=MAX_NAMES)]
    key_lookahead: Count = 0  # of its pages' keys, see core/page_identity.py
    has_window: bool = False  # its cache drops pages in front of others that it keeps


class Welcome(Message, frozen=True):
    router_id: Name
    router_epoch: Unsigned
    connection: Count  # the Hello's: one that was under way while the connection broke answers nobody; 0: "say Hello"
    ticket_key: Annotated[bytes, Meta(max_length=MAX_CODE_BYTES)] = b""  # for this life of the node; empty: none
    clock_ms: Milliseconds = 0  # the router's, as it said this: deadlines of tickets are by that clock


class Heartbeat(Message, frozen=True):
    node_id: Name
    epoch: Unsigned
    load: NodeLoad
    draining: bool
    # draining: when each router is to move what is left of its own; None: nobody has set a limit
    move_after_ms: Milliseconds | None = None
    cache_seq: Count = 0  # of the last CacheEvents that this router was sent


class CacheEvents(Message, frozen=True):
    """What became of cached pages, by identity: in vLLM's words AllBlocksCleared, BlockRemoved, BlockStored, in this
    order. One with `cleared` can be taken after any gap; another one is of use only behind the one before."""

    node_id: Name
    epoch: Unsigned
    seq: Count  # counts this router's, from 1
    cleared: bool
    removed: Annotated[list[PageName], Meta(max_length=MAX_PAGE_NAMES)]
    stored: Annotated[list[PageName], Meta(max_length=MAX_PAGE_NAMES)]


class Goodbye(Message, frozen=True):
    node_id: Name
    epoch: Unsigned


class Unwelcome(Message, frozen=True):
    """The node serves another router of that name, which is up: this one gets nothing here until the other is gone."""

    node_id: Name
    epoch: Unsigned
    endpoint: Text  # of the other one


class Drain(Message, frozen=True):
    """Take nothing new. `then` says what follows once the node is idle; "" to wait for whatever comes. What still runs
    after `move_after_ms` is moved, by each router its own: heartbeats tell them all."""

    node_id: Name
    then: Literal["", "stop", "restart", "prefill", "decode"]
    move_after_ms: Milliseconds | None = None


class CacheReplay(Message, frozen=True):
    """Send the CacheEvents behind number `after`, and those to come. What is not there any more is told anew."""

    node_id: Name
    after: Count


class Generate(Message, frozen=True):
    """`num_sequences` sequences of one prompt; keys are key.sibling(i), seeds sequence_seed(seed, i).

    output_ids[i] holds what sequence i has emitted already (all empty on a first attempt); those listed in `ended`
    need no running any more. With a decode endpoint the receiver prefills and hands over; without one it runs the
    request to its end.
    """

    key: Key
    prompt_ids: TokenIds
    output_ids: Annotated[list[TokenIds], Meta(max_length=MAX_SEQUENCES)]
    num_sequences: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
    sampling: Sampling
    seed: Unsigned
    decode_node: Text  # node id, "" to run everything here
    decode_epoch: Unsigned
    decode_endpoint: Text
    remaining_ms: Milliseconds
    ended: Annotated[list[Count], Meta(max_length=MAX_SEQUENCES)]
    adapter: Text  # digest of the LoRA adapter it runs with; "": none
    scored: Count  # prompt tokens whose log-probabilities are known, where sampling asks for them
    cache_salt: Unsigned  # its KV is of use to requests with the same one only; 0: none
    ticket: Ticket | None = None  # for the decode node's eyes; None: nothing is handed over


class Abort(Message, frozen=True):
    key: Key
    all_sequences: bool


class TokenLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One token's, and the likeliest tokens' beside it. The scheduler's own, too: it travels as it is made."""

    logprob: Real
    top_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOP_LOGPROBS)]
    top_logprobs: Annotated[tuple[Real, ...], Meta(max_length=MAX_TOP_LOGPROBS)]


class TokenRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Consecutive tokens of one sequence; first_pos counts output tokens of the whole request, from 0."""

    key: Key
    first_pos: Count
    ids: Annotated[list[TokenId], Meta(max_length=MAX_RUNS)]
    logprobs: Annotated[list[TokenLogprob], Meta(max_length=MAX_RUNS)]  # empty when none were asked for


class SequenceEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    key: Key
    reason: Text  # core.request.FinishReason value
    num_output_tokens: Count
    cached_tokens: Count
    error_code: Text  # of wire/errors.py; "" unless reason is "error"
    error_message: Text


class Tokens(Message, frozen=True):
    """What one processed step brought; ends come after the runs of the same message."""

    node_id: Name
    epoch: Unsigned
    runs: Annotated[list[TokenRun], Meta(max_length=MAX_RUNS)]
    ends: Annotated[list[SequenceEnd], Meta(max_length=MAX_RUNS)]


class Scores(Message, frozen=True):
    """How likely consecutive tokens of a prompt were; first_pos counts from its first token, which has no entry. They
    come before the first token of that request."""

    node_id: Name
    epoch: Unsigned
    key: Key
    first_pos: Count
    logprobs: Annotated[list[TokenLogprob], Meta(max_length=MAX_SCORES)]


class Begun(Message, frozen=True):
    """The prompts of these are being computed from now on. So a router knows what a node was running when it died."""

    node_id: Name
    epoch: Unsigned
    keys: Annotated[list[Key], Meta(max_length=MAX_RUNS)]


class Offer(Message, frozen=True):
    """P -> D, at once when the request arrives. `generation key` of P's pages travels with Ready, not here."""

    key: Key
    source_node: Name
    source_epoch: Unsigned
    prompt_ids: TokenIds
    output_ids: TokenIds
    sampling: Sampling
    seed: Unsigned
    remaining_ms: Milliseconds
    fingerprint: Fingerprint
    host_id: Name
    transports: Transports
    adapter: Text  # the Generate's: KV of another adapter is of no use
    cache_salt: Unsigned  # the Generate's
    ticket: Ticket | None  # the Generate's


class Grant(Message, frozen=True):
    """D -> P: row and pages are reserved, all or nothing. P sends pages from cached_prefix_len on."""

    key: Key
    cached_prefix_len: Count  # tokens, page aligned
    lease: Unsigned
    transport: Text


class Wait(Message, frozen=True):
    key: Key
    reason: Text


class Refuse(Message, frozen=True):
    key: Key
    code: Text  # of wire/errors.py
    reason: Text


class PoolRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a peer on the same host opens P's pool read-only: /proc/<pid>/fd/<fd>; sizes are checked against the file."""

    pid: Count
    fd: Count
    num_pages: Count
    page_bytes: Count
    nonce: Unsigned  # also written inside the memory: a recycled pid can't be taken for this pool


class Ready(Message, frozen=True):
    """Pages [first_page, first_page + len(pages)) of the request's own page list are final, in these layers.

    shm: `pages` and `generations` index P's pool, the receiver copies. zmq: one frame per page follows the message.
    With a handle, a library reads them. None of these: the receiver asks for them (Take). A digest is of the bytes of
    a page's part: xxh3_64, or in a GPU's memory a sum (shared/transfer/digest.py).
    """

    key: Key
    lease: Unsigned
    first_page: Count
    pages: Annotated[list[Count], Meta(max_length=MAX_TOKENS)]
    generations: Annotated[list[Unsigned], Meta(max_length=MAX_TOKENS)]
    digests: Annotated[list[Unsigned], Meta(max_length=MAX_TOKENS)]
    pool: PoolRef | None
    inline: bool
    first_layer: Count
    num_layers: Count  # 0: from first_layer to the end of the page, all that is behind the layers included
    handle: Annotated[bytes, Meta(max_length=MAX_HANDLE_BYTES)]  # a pool that a library opens; its own bytes
    staged_bytes: Count  # of one page's part, where the receiver asks for them


class Prebuilt(Message, frozen=True):
    """The record that lets D go on without a forward: `committed` tokens have KV, `token` is the next input."""

    key: Key
    lease: Unsigned
    token: TokenId
    logprobs: Annotated[list[TokenLogprob], Meta(max_length=1)]
    committed: Count
    cached_tokens: Count
    draft_state: Annotated[bytes, Meta(max_length=MAX_DRAFT_BYTES)]


class Installed(Message, frozen=True):
    key: Key
    lease: Unsigned


class Failed(Message, frozen=True):
    key: Key
    lease: Unsigned
    code: Text  # of wire/errors.py
    reason: Text


class Join(Message, frozen=True):
    """Come into a process group of us two. Its number is D's, never the same twice in one life."""

    transport: Name
    group: Count


class StoreEntry(Message, frozen=True):
    """What the two sides of a group have to know of each other to connect."""

    group: Count
    name: Name
    value: Annotated[bytes, Meta(max_length=MAX_STORE_BYTES)]


class Take(Message, frozen=True):
    """D will receive this part of these pages as transfer number `order` of the group: P sends it, whatever comes."""

    group: Count
    order: Count
    pages: Annotated[list[Count], Meta(max_length=MAX_TOKENS)]
    first_layer: Count
    num_layers: Count


class Broken(Message, frozen=True):
    """The group is over; what was to come through it will not."""

    group: Count
    reason: Text


AnyMessage = (
    Hello | Welcome | Unwelcome | Heartbeat | Goodbye | Drain | Generate | Abort | Begun | Scores | Tokens
    | Offer | Grant | Wait | Refuse | Ready | Prebuilt | Installed | Failed | Join | StoreEntry | Take | Broken
    | CacheEvents | CacheReplay
)  # fmt: skip
