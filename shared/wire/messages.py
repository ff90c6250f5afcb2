"""Every message between routers and nodes, as a data type. codec.py checks sizes and schema.

    node -> router   Hello, Heartbeat, Begun, Scores, Tokens, CacheEvents, Goodbye, Unwelcome
    router -> node   Welcome, Generate, Abort, Keep, Drain, CacheReplay, Release, LoadAdapter, RemoveAdapter
    router -> node -> other routers          Spending
    P -> D           Offer, Ready, Prebuilt, Abort
    D -> P           Grant, Wait, FramesTaken, Refuse, Installed, Failed
    P -> P           Pull, FramesTaken, Returned
    P -> P, answers  Lent, Ready
    D -> P, both     Join, Take; StoreEntry, Broken          only for transports with a process group per pair

P is a prefill node, D is a decode node. Pages never travel inside a message.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.wire.group_messages import Broken as Broken
from shared.wire.group_messages import Join as Join
from shared.wire.group_messages import StoreEntry as StoreEntry
from shared.wire.group_messages import Take as Take
from shared.wire.keep import Keep as Keep
from shared.wire.node_parts import Adapter as Adapter
from shared.wire.node_parts import AdapterOrder as AdapterOrder
from shared.wire.node_parts import Fingerprint as Fingerprint
from shared.wire.node_parts import NodeLoad as NodeLoad
from shared.wire.node_parts import Weights as Weights
from shared.wire.parts import NO_OTHERS, NOTHING_TAKEN, OthersLoad, PoolRef, Taken
from shared.wire.parts import Key as Key
from shared.wire.parts import Message as Message
from shared.wire.parts import SequenceEnd as SequenceEnd
from shared.wire.parts import TokenLogprob as TokenLogprob
from shared.wire.parts import TokenRun as TokenRun
from shared.wire.ranges import (
    MAX_CODE_BYTES,
    MAX_DRAFT_BYTES,
    MAX_HANDLE_BYTES,
    MAX_NAMES,
    MAX_ORDERS,
    MAX_PAGE_NAMES,
    MAX_PULL_TOKENS,
    MAX_RUNS,
    MAX_SCORES,
    MAX_SEQUENCES,
    MAX_SPENDING_BYTES,
    MAX_TOKENS,
    Count,
    Milliseconds,
    Name,
    PageName,
    Text,
    TokenId,
    TokenIds,
    TraceParent,
    Transports,
    Unsigned,
)
from shared.wire.sampling import Sampling
from shared.wire.tickets import NodeTicket
from shared.wire.tickets import PrefixSource as PrefixSource
from shared.wire.versions import PROTOCOL_VERSION as PROTOCOL_VERSION


class Hello(Message, frozen=True):
    role: Text  # "prefill" | "decode"
    node_id: Name
    epoch: Unsigned
    node_endpoint: Text  # the ROUTER socket that peers dial
    fingerprint: Fingerprint
    max_context: Count
    max_running: Count
    host_id: Name  # nodes with equal ids can share memory; behind a dot, a name of the GPUs that they see
    transports: Transports
    connection: Count  # this connection's number at the router; a repeated Hello has the same number
    adapters: Annotated[list[Adapter], Meta(max_length=MAX_NAMES)]
    key_lookahead: Count = 0  # 1: a token's key also covers the next token (core/page_identity.py)
    has_window: bool = False  # of the pages that CacheEvents tell, early ones go, and later ones of a prefix stay
    weights: Weights | None = None  # None for models without files
    short_context: Count = 0  # pages of longer texts have other identities (LONG in core/page_identity.py); 0: no bound


class Welcome(Message, frozen=True):
    """Answers a Hello. Said again, it asks for a heartbeat at once."""

    router_id: Name
    router_epoch: Unsigned
    connection: Count  # the Hello's number, or 0 to ask for a Hello; a Welcome for a broken connection is ignored
    # With this key the node checks tickets during its epoch. Empty: no key.
    ticket_key: Annotated[bytes, Meta(max_length=MAX_CODE_BYTES)] = b""
    clock_ms: Milliseconds = 0  # the router's clock when it sent this, to convert tickets' deadlines


class Heartbeat(Message, frozen=True):
    node_id: Name
    epoch: Unsigned
    load: NodeLoad
    draining: bool
    # While draining: time until each router moves its unfinished requests. None means no limit.
    move_after_ms: Milliseconds | None = None
    cache_seq: Count = 0  # number of the last CacheEvents to this router
    others: OthersLoad = NO_OTHERS
    leaves: bool = False  # the node's list of routers lacks this one; the node stays until Release
    lacks: Annotated[list[Name], Meta(max_length=MAX_NAMES)] = []  # listed routers where the node is not registered
    taken: Taken = NOTHING_TAKEN
    adapter_orders: Annotated[list[AdapterOrder], Meta(max_length=MAX_ORDERS)] = []  # the last ones, oldest first


class CacheEvents(Message, frozen=True):
    """Changes of the prefix cache, by page identity. Apply `cleared` first, then `removed`, then `stored` (vLLM's
    AllBlocksCleared, BlockRemoved, BlockStored). Without `cleared`, a message's number must be the previous number
    plus 1.
    """

    node_id: Name
    epoch: Unsigned
    seq: Count  # from 1; each router has its own numbers
    cleared: bool
    removed: Annotated[list[PageName], Meta(max_length=MAX_PAGE_NAMES)]
    stored: Annotated[list[PageName], Meta(max_length=MAX_PAGE_NAMES)]


class Goodbye(Message, frozen=True):
    node_id: Name
    epoch: Unsigned


class Unwelcome(Message, frozen=True):
    """The node already serves a router of the receiver's name, and refuses the receiver until that router is gone."""

    node_id: Name
    epoch: Unsigned
    endpoint: Text  # the other router's endpoint


class Drain(Message, frozen=True):
    """Tells a node to accept no new requests. `then`: the node's next step once it is idle; "" means wait. After
    `move_after_ms` all routers move their unfinished requests; heartbeats announce that time.
    """

    node_id: Name
    then: Literal["", "stop", "restart", "prefill", "decode"]
    move_after_ms: Milliseconds | None = None


class LoadAdapter(Message, frozen=True):
    """Tells a node to load a LoRA adapter from its --lora-dir. Heartbeats say what came of it. Said again, with the
    same number, it changes nothing.
    """

    node_id: Name
    number: Unsigned  # drawn by the router, so that it knows its order among those of others
    name: Name
    path: Text  # relative to the node's --lora-dir


class RemoveAdapter(Message, frozen=True):
    """Tells a node to accept no new requests for an adapter. Its slot is free when the last request has ended.

    After `move_after_ms` the node fails the remaining requests, and routers continue them on nodes that have the
    adapter.
    """

    node_id: Name
    number: Unsigned
    name: Name
    move_after_ms: Milliseconds


class Release(Message, frozen=True):
    """Lets a node leave this router: none of the router's requests needs the node."""

    node_id: Name


class CacheReplay(Message, frozen=True):
    """Asks for the CacheEvents after number `after`, or for the whole cache if the node no longer keeps them."""

    node_id: Name
    after: Count


class Spending(Message, frozen=True):
    """A router's charges to its tenants in this epoch. Nodes pass the latest Spending on to their other routers,
    without reading it."""

    router_id: Name
    router_epoch: Unsigned
    number: Count  # grows within this epoch; receivers ignore older numbers
    body: Annotated[bytes, Meta(max_length=MAX_SPENDING_BYTES)]  # signed: router/queue/spending.py


class Generate(Message, frozen=True):
    """Asks for `num_sequences` sequences of one prompt.

    Sequence i has the key key.sibling(i) and the seed sequence_seed(seed, i). output_ids[i]: tokens that
    sequence i has already emitted. The sequences in `ended` need no more steps. With a decode endpoint the receiver
    prefills, and hands the request over. Otherwise the receiver runs the whole request.
    It has many fields because it is all that a node learns of a request.
    """

    key: Key
    prompt_ids: TokenIds
    output_ids: Annotated[list[TokenIds], Meta(max_length=MAX_SEQUENCES)]
    num_sequences: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
    sampling: Sampling
    seed: Unsigned
    decode_node: Text  # the decode node's id; "": the receiver runs everything
    decode_epoch: Unsigned
    decode_endpoint: Text
    remaining_ms: Milliseconds
    ended: Annotated[list[Count], Meta(max_length=MAX_SEQUENCES)]
    adapter: Text  # the LoRA adapter's digest; "": no adapter
    scored: Count  # number of prompt tokens whose wanted log-probabilities the router already has
    cache_salt: Unsigned  # only requests with the same salt share KV; 0 means no salt
    ticket: NodeTicket | None = None  # ticket for the decode node; None means no hand-off
    source: PrefixSource | None = None  # None: the node computes all uncached tokens itself
    tenant: Unsigned = 0  # a hash of its name, because answers of one tenant have similar lengths; 0: unknown
    trace: TraceParent = ""  # the W3C traceparent of the attempt's span, or the client's; "": none


class Abort(Message, frozen=True):
    """The request is over. A prefill node sends Abort to a decode node, too."""

    key: Key
    all_sequences: bool  # false: only the key's sequence is over


class Tokens(Message, frozen=True):
    """The tokens and sequence ends of one processed step. `ends` come after the `runs` of the same message."""

    node_id: Name
    epoch: Unsigned
    runs: Annotated[list[TokenRun], Meta(max_length=MAX_RUNS)]
    ends: Annotated[list[SequenceEnd], Meta(max_length=MAX_RUNS)]


class Scores(Message, frozen=True):
    """Log-probabilities of consecutive prompt tokens, sent before the first output token. The prompt's first token has
    position 0, but no entry."""

    node_id: Name
    epoch: Unsigned
    key: Key
    first_pos: Count
    logprobs: Annotated[list[TokenLogprob], Meta(max_length=MAX_SCORES)]


class Begun(Message, frozen=True):
    """The node now computes the prompts of these requests. If the node dies, the router knows which requests the
    node ran."""

    node_id: Name
    epoch: Unsigned
    keys: Annotated[list[Key], Meta(max_length=MAX_RUNS)]


class Offer(Message, frozen=True):
    """P asks D for memory as soon as a request arrives."""

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
    adapter: Text  # copied from Generate, like the next two fields
    cache_salt: Unsigned
    ticket: NodeTicket | None
    tenant: Unsigned = 0
    trace: TraceParent = ""  # "": the decode node writes no spans of the request


class Grant(Message, frozen=True):
    """A row and all pages are reserved on D. P sends the pages after the first cached_prefix_len tokens."""

    key: Key
    cached_prefix_len: Count  # in tokens; a multiple of the page size
    lease: Unsigned
    transport: Text


class Wait(Message, frozen=True):
    key: Key
    reason: Text


class Refuse(Message, frozen=True):
    key: Key
    code: Text  # a code of wire/errors.py
    reason: Text


class Ready(Message, frozen=True):
    """Pages [first_page, first_page + len(pages)) of the request's page list are final in the message's layers.

    With page groups the list goes on without the pages that no step of D reads. D has no page for them either.

    shm: the receiver copies `pages` from P's pool, and they must still have these `generations`. zmq: one frame per
    page follows. With a handle, a library reads the pages. Otherwise the receiver asks for pages with Take. A digest
    covers the bytes of a page's part. It is xxh3_64, or a weighted sum in GPU memory (shared/transfer/digest.py).
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
    num_layers: Count  # 0: first_layer and all bytes behind it, including the planes after the layers
    handle: Annotated[bytes, Meta(max_length=MAX_HANDLE_BYTES)]  # bytes with which a library opens the pool
    staged_bytes: Count  # size of each page's part in bytes, if the receiver asks for the pages; else 0


class FramesTaken(Message, frozen=True):
    """The receiver has taken one Ready and its frames. Only a few Readys may await this message."""

    key: Key
    lease: Unsigned


class Prebuilt(Message, frozen=True):
    """Lets D decode without a forward pass: `committed` tokens have KV, and `token` is the next input."""

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
    code: Text  # a code of wire/errors.py
    reason: Text


class Pull(Message, frozen=True):
    """A prefill node asks another prefill node for a prompt's cached pages [first_page, num_pages) in all groups."""

    key: Key
    lease: Unsigned  # the asking node's number for this pull, never reused
    # The tokens of num_pages pages, and one more token if page keys look ahead.
    prompt_ids: Annotated[list[TokenId], Meta(max_length=MAX_PULL_TOKENS + 1)]
    first_page: Count
    num_pages: Count
    last_page: PageName  # the last page's identity, named by the router and bound to the ticket
    within_ms: Milliseconds  # the asking node waits at most this time
    fingerprint: Fingerprint
    host_id: Name
    transports: Transports
    adapter: Text
    cache_salt: Unsigned
    ticket: NodeTicket


class Lent(Message, frozen=True):
    """Answers a Pull: what reads on after the prompt's first num_pages pages is pinned, and Ready follows. `num_pages`
    0: the Pull is refused, or the pages are no longer lent.
    """

    key: Key
    lease: Unsigned
    num_pages: Count
    transport: Text
    reason: Text


class Returned(Message, frozen=True):
    """The pull has ended, with or without success. Its pages need not stay pinned."""

    key: Key
    lease: Unsigned


AnyMessage = (
    Hello | Welcome | Unwelcome | Heartbeat | Goodbye | Drain | Generate | Abort | Keep | Begun | Scores | Tokens
    | Offer | Grant | Wait | Refuse | Ready | Prebuilt | Installed | Failed | Join | StoreEntry | Take | Broken
    | CacheEvents | CacheReplay | Release | LoadAdapter | RemoveAdapter | Spending | Pull | Lent | Returned
    | FramesTaken
)  # fmt: skip
