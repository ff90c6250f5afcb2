"""One message of each kind, with something in every field: what codec, limits and fuzzing begin with."""

from __future__ import annotations

from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams
from shared.wire.codec import to_wire
from shared.wire.messages import (
    Abort,
    Adapter,
    AdapterOrder,
    Begun,
    Broken,
    CacheEvents,
    CacheReplay,
    Drain,
    Failed,
    Fingerprint,
    FramesTaken,
    Generate,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    Installed,
    Join,
    Keep,
    Lent,
    LoadAdapter,
    Message,
    NodeLoad,
    Offer,
    Prebuilt,
    PrefixSource,
    Pull,
    Ready,
    Refuse,
    Release,
    RemoveAdapter,
    Returned,
    Scores,
    SequenceEnd,
    Spending,
    StoreEntry,
    Take,
    TokenLogprob,
    TokenRun,
    Tokens,
    Unwelcome,
    Wait,
    Weights,
    Welcome,
)
from shared.wire.parts import OthersLoad, PoolRef, Taken
from shared.wire.tickets import NodeTicket

KEY = RequestKey("router", 0xFFFF_FFFF_FFFF_FFFF, "cmpl-1", 0, 3)
SAMPLING = SamplingParams(
    max_tokens=16,
    temperature=0.7,
    logit_bias=((5, -1.0),),
    stop_token_ids=(1, 2),
    num_logprobs=4,
    prompt_logprobs=2,
    allowed_token_ids=(3, 5),
    bad_words=((7,), (8, 9)),
    grammar="g",
)
WIRE_KEY, WIRE_SAMPLING = to_wire(KEY), to_wire(SAMPLING)
FINGERPRINT = Fingerprint(
    protocol=1,
    numerics=1,
    model="m",
    weights="w",
    dtype="f",
    page_size=16,
    page_layout="l",
    spec="none",
    build="b",
    grammar="g",
)
LOAD = NodeLoad(
    10, {"free": 10}, 4, {"free": 4}, 0, 0, 4, {"steps": 1.0}, {"baton_step_seconds": [0.1]}, {"d": "shm: why"}, "1"
)
LOGPROBS = TokenLogprob(-0.5, (1, 2), (-0.5, -1.5))
TICKET = NodeTicket(4, 19, 2_000, b"\x02" * 32)
GENERATE = Generate(
    key=WIRE_KEY, prompt_ids=[1, 2, 3], output_ids=[[], [7]], num_sequences=2, sampling=WIRE_SAMPLING, seed=9,
    decode_node="d", decode_epoch=1, decode_endpoint="tcp://127.0.0.1:1", remaining_ms=100,
    ended=[], adapter="b", scored=3, cache_salt=2**64 - 1, ticket=TICKET,
    source=PrefixSource("s", 1, "tcp://127.0.0.1:4", 2, b"\x05" * 16, 50, TICKET),
)  # fmt: skip
READY = Ready(WIRE_KEY, 1, 0, [4, 5], [1, 1], [2**64 - 1, 3], PoolRef(1, 2, 3, 4, 5), False, 2, 3, b"", 0)
INLINE = Ready(WIRE_KEY, 1, 0, [4, 5], [1, 1], [8, 3], None, True, 0, 0, b"", 0)
STAGED = Ready(WIRE_KEY, 1, 0, [4, 5], [1, 1], [8, 3], None, False, 0, 0, b"", 640)
REMOTE = Ready(WIRE_KEY, 1, 0, [4, 5], [1, 1], [8, 3], None, False, 0, 0, b"\x01", 0)
MESSAGES: list[Message] = [
    Hello("decode", "d", 1, "tcp://127.0.0.1:1", FINGERPRINT, 2048, 32, "host", ["zmq", "shm"], 1, [Adapter("a", "b")],
          1, True, Weights("AWQ 4 bits", "bfloat16", 1 << 20, 1 << 22)),
    Welcome("router", 1, 1, b"\x01" * 32, 7), Unwelcome("d", 1, "tcp://127.0.0.1:2"),
    Heartbeat("d", 1, LOAD, True, 500, 5, OthersLoad(1, 2, 3, 4), True, ["tcp://127.0.0.1:3"],
              Taken(7, [WIRE_KEY]), [AdapterOrder(7, "sql", "refused", "", "no folder")]), Goodbye("d", 1),
    Drain("d", "", 500), GENERATE, LoadAdapter("d", 7, "sql", "team/sql"), RemoveAdapter("d", 8, "sql", 500),
    Abort(WIRE_KEY, True), Tokens("d", 1, [TokenRun(WIRE_KEY, 0, [5, 6], [LOGPROBS])],
                                  [SequenceEnd(WIRE_KEY, "stop", 2, 0, "", "")]),
    Offer(WIRE_KEY, "p", 1, [1, 2], [], WIRE_SAMPLING, 9, 100, FINGERPRINT, "host", ["zmq"], "b", 7, TICKET),
    Grant(WIRE_KEY, 16, 7, "shm"), Wait(WIRE_KEY, "pages"), Refuse(WIRE_KEY, "too_large", "pages"), READY, INLINE,
    Prebuilt(WIRE_KEY, 7, 11, [LOGPROBS], 3, 0, b"\x00\x01"), Installed(WIRE_KEY, 7),
    Failed(WIRE_KEY, 7, "handoff_failed", "digest"),
    STAGED, REMOTE, Begun("d", 1, [WIRE_KEY]), Scores("d", 1, WIRE_KEY, 1, [LOGPROBS]),
    Join("gloo", 1), StoreEntry(1, "0/1", b"\x00\x01"), Take(1, 4, [4, 5], 2, 3),
    Broken(1, "reset by peer"),
    CacheEvents("d", 1, 5, True, [b"\x03" * 16], [b"\x04" * 16]), CacheReplay("d", 4), Release("d"),
    Spending("router", 1, 3, b"\x06" * 40), Keep(WIRE_KEY, 30_000),
    Pull(WIRE_KEY, 7, [1, 2], 1, 2, b"\x05" * 16, 50, FINGERPRINT, "host", ["zmq"], "b", 7, TICKET),
    Lent(WIRE_KEY, 7, 2, "zmq", ""), Returned(WIRE_KEY, 7), FramesTaken(WIRE_KEY, 7),
]  # fmt: skip
