"""What one message may weigh, by its kind, and how much is read before others have their turn."""

from __future__ import annotations

import asyncio
import io
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

import msgpack
import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from router.dispatch import gateway
from router.dispatch.gateway import TURN_S, Gateway
from shared.core.errors import WireError
from shared.core.keys import RequestKey
from shared.node.records.convert import MESSAGE_BYTES, tokens_of
from shared.observe.log import Logger
from shared.observe.metrics import ClusterMetrics
from shared.wire import codec
from shared.wire.codec import AT_ROUTER, BY_DECODE, MOST_BYTES, MOST_BYTES_OF, decode, encode, to_wire
from shared.wire.messages import Begun, Goodbye, Key, Message, Offer, SequenceEnd, TokenLogprob, TokenRun, Tokens
from shared.wire.peers import Inbound, Received, WireStats
from shared.wire.zeromq import budget
from shared.wire.zeromq.budget import BATCH_BYTES, MAX_BATCH, Budget
from shared.wire.zeromq.link import RouterLink
from shared.wire.zeromq.link_options import LinkOptions
from shared.wire.zeromq.sockets import DealerSocket, RouterSocket
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.wire.wire_samples import MESSAGES, WIRE_KEY
from tests.support.worlds.router_rig import RouterRig

# ---- size by kind


def tokens_of_size(size: int) -> bytes:
    runs = [TokenRun(WIRE_KEY, 0, [1] * 16384, [])] * 15

    def made(text: int) -> bytes:
        return encode(Tokens("d", 1, runs, [SequenceEnd(WIRE_KEY, "error", 2, 0, "", "x" * text)]))

    data = made(300 + size - len(made(300)))
    assert len(data) == size
    return data


def test_a_step_s_tokens_are_a_quarter_of_a_mebibyte_at_most() -> None:
    """The defect: a valid one of 11.5 MB stopped the router for 2.5 s."""
    assert decode(tokens_of_size(256 << 10))
    with pytest.raises(WireError, match="262145 bytes where 262144 are allowed"):
        decode(tokens_of_size((256 << 10) + 1))


def test_a_kind_that_is_not_named_has_a_limit_too() -> None:
    key = Key("r" * 250, 2**64 - 1, "x" * 250, 0, 0)
    fits = Begun("d", 1, [key] * 2000)
    assert len(encode(fits)) < MOST_BYTES and decode(encode(fits)) == fits
    with pytest.raises(WireError, match=f"where {MOST_BYTES} are allowed"):
        decode(encode(Begun("d", 1, [key] * 2100)))


def test_what_is_too_large_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def decode(self, data: bytes) -> None:
            raise AssertionError("it was decoded")

    monkeypatch.setattr(codec, "DECODERS", defaultdict(Never))
    for kind, most in MOST_BYTES_OF.items():
        (sample, *_) = [message for message in MESSAGES if isinstance(message, kind)]
        with pytest.raises(WireError, match=f"where {most} are allowed"):
            decode(encode(sample).ljust(most + 1, b"\x00"))
        with pytest.raises(AssertionError, match="decoded"):
            decode(encode(sample).ljust(most, b"\x00"))


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb({"node_id": "d", "epoch": 1, "t": "Goodbye"}),
        b"\x83\xa1t\xa7Goodbye\xa7node_id\xa1d\xa1t\xa5Hello",
        b"\x83\xa1t",
        b"\x83\xa1t\x01",
        b"\xde\x00\x03\xa1u\xa7Goodbye",
        b"\xde",
        b"\x82\xa1t\xbfGoodbye",
    ],
    ids=["last", "twice", "cut", "number", "another name", "nothing", "longer than the rest"],
)
def test_the_kind_stands_first_and_once(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_a_router_and_a_prefill_node_take_no_prompt_and_no_frame() -> None:
    offer = next(message for message in MESSAGES if isinstance(message, Offer))
    for limits in (AT_ROUTER, BY_DECODE):
        assert decode(encode(offer), limits) == offer
        with pytest.raises(WireError, match="bytes where 1048576 are allowed"):
            decode(encode(offer).ljust((1 << 20) + 1, b"\x00"), limits)
        assert limits.max_frames == 0 and limits.max_frame_bytes == 1 << 20


# ---- a node's own tokens stay below


def run(number: int, num_ids: int = 4, num_top: int = 20) -> TokenRun:
    entry = TokenLogprob(-0.25, (2**31 - 1,) * num_top, (-3.3e38,) * num_top)
    key = to_wire(RequestKey("r" * 200, 2**64 - 1, "x" * 200, 0, number))
    return TokenRun(key, number, [2**31 - 1] * num_ids, [entry] * num_ids)


def test_a_large_step_is_told_in_several_messages() -> None:
    runs = [run(number) for number in range(1024)]
    ends = [SequenceEnd(one.key, "error", 1, 0, "internal", "é" * 16384) for one in runs[:40]]
    messages = tokens_of("n" * 200, 2**64 - 1, runs, ends)
    assert len(messages) > 10
    assert max(len(encode(message)) for message in messages) <= MESSAGE_BYTES + 2048
    assert [one for message in messages for one in message.runs] == runs
    assert [one for message in messages for one in message.ends] == ends


def test_a_usual_step_is_one_message() -> None:
    runs = [run(number, 1, 0) for number in range(64)]
    assert tokens_of("d", 1, runs, []) == [Tokens("d", 1, runs, [])]


# ---- turns of a socket


def test_a_turn_ends_after_so_many_messages_bytes_or_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(budget.time, "thread_time", lambda: now)
    by_number, by_bytes, by_time = Budget(), Budget(), Budget()
    for _ in range(MAX_BATCH):
        assert not by_number.is_spent
        by_number.take(1)
    assert by_number.is_spent
    by_bytes.take(BATCH_BYTES - 1)
    assert not by_bytes.is_spent
    by_bytes.take(1)
    assert by_bytes.is_spent
    now += 60.0
    assert not by_time.is_spent, "one message is always taken"
    by_time.take(1)
    assert by_time.is_spent


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def heavy() -> Message:
    """About 300 KiB."""
    offer = next(message for message in MESSAGES if isinstance(message, Offer))
    return msgspec.structs.replace(offer, source_node="p", source_epoch=1, prompt_ids=[70_000] * 60_000)


def test_a_bound_socket_reads_a_mebibyte_then_lets_others_read(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "BATCH_S", 1e9)
    router = RouterSocket(context, "tcp://127.0.0.1:0", LinkOptions())
    dealer = DealerSocket(context, "d@1", router.endpoint, "p@1", LinkOptions(), WireStats())
    for _ in range(10):
        assert dealer.send(heavy())
    shares: list[int] = []
    while sum(shares) < 10:
        router.socket.poll(1000)
        shares.append(sum(isinstance(one, Received) for one in router.receive()))
    assert max(shares) <= 4
    dealer.close()
    router.close()


def turns(receive: Callable[[], list[Inbound]], told: list[int]) -> list[int]:
    """How many parts each turn read, until the message behind the long one came."""
    read = list[int]()
    while True:
        before = len(told)
        inbound = receive()
        read.append(len(told) - before)
        if any(isinstance(one, Received) for one in inbound):
            return read


@pytest.mark.parametrize("reads", ["bound", "dialled"])
def test_a_message_of_many_parts_is_dropped_in_turns(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    """The defect: a million empty parts blocked a router's loop for seconds, and took a gibibyte."""
    monkeypatch.setattr(budget, "BATCH_S", 1e9)
    options, told = LinkOptions(limits=AT_ROUTER), list[int]()
    router = RouterSocket(context, "tcp://127.0.0.1:0", options)
    dealer = DealerSocket(context, "d@1", router.endpoint, "p@1", options, WireStats())
    monkeypatch.setattr(router.watch, "delivered", lambda fd, sizes, peer: told.extend(sizes))
    dealer.send(Goodbye("p", 1))
    until_received(router)
    if reads == "bound":
        reader, stats = router, router.stats
        dealer.socket.send_multipart([b"x"] * 10_000)
        dealer.send(Goodbye("p", 1))
    else:
        reader, stats = dealer, dealer._stats
        monkeypatch.setattr(dealer._watch, "delivered", lambda fd, sizes, peer: told.extend(sizes))
        until_watched(dealer)
        router.socket.send_multipart([router._routes["p@1"], *[b"x"] * 10_000])
        router.send("p@1", Goodbye("p", 1))
    told.clear()
    read = turns(reader.receive, told)
    assert max(read) <= MAX_BATCH + options.limits.max_frames + 2 and told[:-1] == [1] * 10_000
    assert stats.counts["wire_dropped"] == 1
    dealer.close()
    router.close()


def until_received(router: RouterSocket) -> None:
    while not any(isinstance(one, Received) for one in router.receive()):
        router.socket.poll(1000)


def until_watched(dealer: DealerSocket) -> None:
    while dealer._connection is None:
        dealer.receive()


# ---- turns of the router's loop


class SlowLink:
    """Gives one large batch, and then nothing more."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self, batch: list[Inbound]) -> None:
        self._batches = [batch]

    def send(self, peer: str, message: Message) -> bool:
        return True

    async def receive(self) -> list[Inbound]:
        if not self._batches:
            await asyncio.Event().wait()
        return self._batches.pop()


def test_clients_have_their_turn_within_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, ticks, seen = RouterRig(), iter(range(1 << 30)), []
    monkeypatch.setattr(gateway.time, "thread_time", lambda: next(ticks) * TURN_S / 4)

    async def others() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    async def main() -> None:
        batch: list[Inbound] = [Received("d@1", Goodbye("d", 1)) for _ in range(100)]
        log, metrics = Logger("r", io.StringIO()), ClusterMetrics(CollectorRegistry())
        router = Gateway(("r", 9), rig.registry, rig.dispatcher, SlowLink(batch), metrics, log)
        handle = router.handle
        router.handle = lambda inbound: (seen.append("node"), handle(inbound))  # type: ignore[method-assign, assignment]
        tasks = [asyncio.create_task(router._receive()), asyncio.create_task(others())]
        while seen.count("node") < 100:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()

    asyncio.run(main())
    first, last = seen.index("node"), len(seen) - 1 - seen[::-1].index("node")
    assert seen[first:last].count("other") >= 20


def test_dropped_messages_leave_turns_to_others() -> None:
    """The defect: while one peer sent junk, nothing else ran in the router's loop."""
    num_junk, seen = 20 * MAX_BATCH, [0]

    async def others(link: RouterLink) -> None:
        while True:
            seen.append(link.stats.counts["wire_dropped"])
            await asyncio.sleep(0)

    async def main() -> None:
        link = RouterLink("tcp://127.0.0.1:*")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.SNDHWM, 0)
        peer.connect(link.endpoint)
        for _ in range(num_junk):
            peer.send(b"junk")
        tasks = [asyncio.create_task(link.receive()), asyncio.create_task(others(link))]
        async with asyncio.timeout(HANG_GUARD_S):
            while seen[-1] < num_junk:
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        peer.close(0), context.term(), link.close()

    asyncio.run(main())
    assert max(after - before for before, after in pairwise(seen)) <= MAX_BATCH
