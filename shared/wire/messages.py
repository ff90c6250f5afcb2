"""Every message between router and nodes, as data. The codec beside this file checks sizes and schema.

    node -> router   Hello, Heartbeat, Tokens, Finished, Goodbye
    router -> node   Welcome, Generate, Abort, Drain
    P -> D           Offer, Ready, Prebuilt, Abort
    D -> P           Grant, Wait, Refuse, Installed, Failed

Tensors never travel inside a message: they are separate, length-checked frames (`Ready` and `Prebuilt` say which).
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of all messages; the tag is the class name."""


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`core.keys.RequestKey` on the wire."""

    router_id: str
    router_epoch: int
    rid: str
    attempt: int
    seq_index: int


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`core.sampling_params.SamplingParams` on the wire."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[int, float]]
    min_tokens: int
    stop_token_ids: list[int]
    num_logprobs: int


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two nodes pair only when all fields but `build` are equal; a refusal names the field that differs."""

    protocol: int
    numerics: int
    model: str
    weights: str
    dtype: str
    page_size: int
    page_layout: str
    spec: str
    build: str


class NodeLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gauges of a node, sent with every heartbeat. Page states partition pages_total, row states rows_total."""

    pages_total: int
    pages: dict[str, int]  # free, cached, active, granted, held
    rows_total: int
    rows: dict[str, int]  # free, running, prefilling, granted, held
    waiting: int
    waiting_tokens: int
    counters: dict[str, float]  # monotone totals since the epoch began (steps, wire errors, idle seconds, ...)
    observations: dict[str, list[float]]  # histogram samples since the last heartbeat, by metric name


class Hello(Message, frozen=True):
    role: str  # "prefill" | "decode"
    node_id: str
    epoch: int
    node_endpoint: str  # where peers dial this node (ROUTER socket)
    fingerprint: Fingerprint
    max_context: int
    max_running: int
    host_id: str  # equal on nodes that can share memory
    transports: list[str]


class Welcome(Message, frozen=True):
    router_id: str
    router_epoch: int


class Heartbeat(Message, frozen=True):
    node_id: str
    epoch: int
    load: NodeLoad
    draining: bool


class Goodbye(Message, frozen=True):
    node_id: str
    epoch: int


class Drain(Message, frozen=True):
    node_id: str


class Generate(Message, frozen=True):
    """`num_sequences` sequences of one prompt; keys are key.sibling(i), seeds sequence_seed(seed, i).

    output_ids[i] holds what sequence i has emitted already (all empty on a first attempt). With a decode endpoint
    the receiver prefills and hands over; without one it runs the request to its end.
    """

    key: Key
    prompt_ids: list[int]
    output_ids: list[list[int]]
    num_sequences: int
    sampling: Sampling
    seed: int
    decode_node: str  # node id, "" to run everything here
    decode_epoch: int
    decode_endpoint: str
    remaining_ms: int


class Abort(Message, frozen=True):
    key: Key
    all_sequences: bool


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Consecutive tokens of one sequence; first_pos counts output tokens of the whole request, from 0."""

    key: Key
    first_pos: int
    ids: list[int]
    logprobs: list[TokenLogprobs]  # empty when none were asked for


class SequenceEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    key: Key
    reason: str  # core.request.FinishReason value
    num_output_tokens: int
    cached_tokens: int
    error_code: str  # "" unless reason is "error"
    error_message: str


class Tokens(Message, frozen=True):
    """What one processed step brought; ends come after the runs of the same message."""

    node_id: str
    epoch: int
    runs: list[TokenRun]
    ends: list[SequenceEnd]


class Offer(Message, frozen=True):
    """P -> D, at once when the request arrives. `generation key` of P's pages travels with Ready, not here."""

    key: Key
    source_node: str
    source_epoch: int
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: Sampling
    seed: int
    remaining_ms: int
    fingerprint: Fingerprint
    host_id: str
    transports: list[str]


class Grant(Message, frozen=True):
    """D -> P: row and pages are reserved, all or nothing. P sends pages from cached_prefix_len on."""

    key: Key
    cached_prefix_len: int  # tokens, page aligned
    lease: int
    transport: str


class Wait(Message, frozen=True):
    key: Key
    reason: str


class Refuse(Message, frozen=True):
    key: Key
    reason: str


class PoolRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a peer on the same host opens P's pool read-only: /proc/<pid>/fd/<fd>; sizes are checked against the file."""

    pid: int
    fd: int
    num_pages: int
    page_bytes: int
    nonce: int  # also written inside the memory: a recycled pid can't be taken for this pool


class Ready(Message, frozen=True):
    """Pages [first_page, first_page + len(pages)) of the request's own page list are final.

    shm: `pages` and `generations` index P's pool, the receiver copies. zmq: one frame of page_bytes per page
    follows the message. A digest is xxh3_64 over the page's bytes.
    """

    key: Key
    lease: int
    first_page: int
    pages: list[int]
    generations: list[int]
    digests: list[int]
    pool: PoolRef | None
    inline: bool


class Prebuilt(Message, frozen=True):
    """The record that lets D go on without a forward: `committed` tokens have KV, `token` is the next input."""

    key: Key
    lease: int
    token: int
    logprobs: list[TokenLogprobs]
    committed: int
    cached_tokens: int
    draft_hidden: bytes


class Installed(Message, frozen=True):
    key: Key
    lease: int


class Failed(Message, frozen=True):
    key: Key
    lease: int
    reason: str


AnyMessage = (
    Hello | Welcome | Heartbeat | Goodbye | Drain | Generate | Abort | Tokens
    | Offer | Grant | Wait | Refuse | Ready | Prebuilt | Installed | Failed
)  # fmt: skip
