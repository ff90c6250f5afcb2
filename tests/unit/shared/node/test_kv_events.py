"""KV events in vLLM's format: what a follower makes of them is what the cache holds, and it can't hold up the node."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from shared.config.processes import NodeParts
from shared.config.settings.event_settings import EventsConfig
from shared.config.settings.transfer_settings import TransferConfig
from shared.core.errors import ConfigError
from shared.core.page_identity import KEY_BYTES, ROOT, child_identity, prefix_keys
from shared.core.sampling_params import SamplingParams
from shared.node.machine.kv_events import LEAST_BETWEEN_S, KvEvents, hash_of
from shared.node.records.cache_teller import CacheTeller
from shared.node.records.core import NodeCore
from shared.wire.zeromq import publisher
from shared.wire.zeromq.publisher import Publisher
from tests.support.cores.core_rig import CoreKnobs, Job, make_core
from tests.support.machine.patience import HANG_GUARD_S

SIZE = 8  # tokens in a page
TOPIC = "kv@node-1@hashlm"
STEMS = [[random.Random(stem).randrange(95) for _ in range(40)] for stem in range(3)]


class Wire(msgspec.Struct, tag=True, array_like=True):
    """How followers declare the events: a tag, then fields by position; a follower of today skips later ones."""


class BlockStored(Wire):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Wire):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Wire):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class Follower:
    """A SUB socket, and by block hash all tokens from the prompt's beginning."""

    def __init__(self, endpoint: str, prefix: str = "kv@", most_unread: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, most_unread)
        self.socket.setsockopt(zmq.RCVTIMEO, int(HANG_GUARD_S * 1000))
        self.socket.setsockopt_string(zmq.SUBSCRIBE, prefix)
        self.socket.connect(endpoint)
        self.blocks: dict[int, list[int]] = {}
        self.numbers: list[int] = []
        self.num_cleared = self.num_removed = 0

    def take_message(self) -> None:
        topic, number, payload = self.socket.recv_multipart()
        assert topic == TOPIC.encode() and len(number) == 8
        self.numbers.append(int.from_bytes(number, "big"))
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert batch.ts == 1234.5 and batch.data_parallel_rank == 0
        for event in batch.events:
            self._take_event(event)

    def _take_event(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            self.num_cleared += 1
        elif isinstance(event, BlockRemoved):
            assert self.blocks.keys() >= set(event.block_hashes), "removed, but never stored"
            for block in event.block_hashes:
                del self.blocks[block]
            self.num_removed += len(event.block_hashes)
        else:
            assert (event.block_size, event.lora_id, event.medium, event.lora_name) == (SIZE, None, "GPU", None)
            assert len(event.token_ids) == SIZE * len(event.block_hashes)
            parent = event.parent_block_hash
            assert parent is None or parent in self.blocks, "stored behind a block that was never told"
            before = [] if parent is None else self.blocks[parent]
            for block, end in zip(event.block_hashes, itertools.count(SIZE, SIZE), strict=False):
                before = self.blocks[block] = [*before, *event.token_ids[end - SIZE : end]]

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


class Rig:
    """A node's core that publishes. `now` is its clock."""

    def __init__(self, knobs: CoreKnobs) -> None:
        self.core = make_core(knobs)
        self.now = 0.0
        self.publisher = Publisher("tcp://127.0.0.1:0", TOPIC)
        lookahead = self.core.settings.drafts.key_lookahead
        self.events = KvEvents(self.publisher, SIZE, lookahead, lambda: self.now, lambda: 1234.5)
        self.teller = CacheTeller(self.core.kv, "node-1", 1, self.events)
        self.num_sent = 0
        self.followers: list[Follower] = []
        self._send = self.publisher.publish
        self.publisher.publish = self._count  # type: ignore[method-assign]

    def _count(self, payload: bytes) -> None:
        self.num_sent += 1
        self._send(payload)

    def join(self) -> Follower:
        """Return a follower that the node has heard of, and told all pages."""
        self.now += LEAST_BETWEEN_S
        follower, sent = Follower(self.publisher.endpoint), self.num_sent
        self.followers.append(follower)
        ends = time.monotonic() + HANG_GUARD_S
        while self.num_sent == sent:
            assert time.monotonic() < ends
            list(self.teller.tell(()))
        self.catch_up(follower)
        return follower

    def catch_up(self, follower: Follower) -> None:
        while self.teller.has_more:
            list(self.teller.tell(()))
        while not follower.numbers or follower.numbers[-1] < self.num_sent - 1:
            follower.take_message()

    def run(self, job: Job, *, tells: bool = True) -> None:
        self.core.scheduler.intake.submit(job.request())
        while self.core.queues.requests or not self.core.loop.idle:
            self.core.loop.step(block=True)
            self.core.take_events()
            if tells:
                list(self.teller.tell(()))

    def close(self) -> None:
        for follower in self.followers:
            follower.close()
        self.publisher.close()
        self.core.close()


def job(rid: int, **more: Any) -> Job:
    """`more`: what the job's answer depends on, besides."""
    rng = random.Random(rid)
    prompt = (*rng.choice(STEMS), *(rng.randrange(95) for _ in range(rng.randrange(30))))
    sampling = SamplingParams(max_tokens=rng.randrange(1, 20), temperature=0.0)
    return Job(rid, prompt, sampling, 1, **more)


def held(core: NodeCore, jobs: list[Job]) -> dict[int, list[int]]:
    """Return what a follower must know: of each page that is cached, and which one of these jobs made, its tokens from
    the prompt's beginning."""
    cached, found = set(core.kv.cache.cached_names()), dict[int, list[int]]()
    lookahead = core.settings.drafts.key_lookahead
    for one in jobs:
        ids = [*one.prompt, *one.expected()]
        keys = prefix_keys(b"".join(i.to_bytes(8, "little") for i in ids), "", lookahead, 0)
        identity = ROOT
        for end in range(SIZE, len(keys) // KEY_BYTES + 1, SIZE):
            identity = child_identity(identity, keys[(end - SIZE) * KEY_BYTES : end * KEY_BYTES])
            if identity in cached:
                found[hash_of(identity)] = ids[:end]
    assert len(found) == len(cached)
    return found


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    """Whatever is put in is closed."""
    opened: list[Rig] = []
    yield opened
    for rig in opened:
        rig.close()


KNOBS = {
    "all_tokens": CoreKnobs(num_pages=40, page_size=SIZE),
    "lookahead": CoreKnobs(num_pages=40, page_size=SIZE, width=3),
    "two_groups": CoreKnobs(num_pages=70, page_size=SIZE, window=0, lower_window=24),
}


@pytest.mark.parametrize("name", KNOBS)
def test_a_follower_s_mirror_is_the_cache(rigs: list[Rig], name: str) -> None:
    """Prompts share beginnings, and a small pool evicts. At last all is cleared."""
    knobs = KNOBS[name]
    rigs.append(rig := Rig(knobs))
    follower = rig.join()
    jobs = [job(rid, window=knobs.window, lower_window=knobs.lower_window) for rid in range(30)]
    for one in jobs:
        rig.run(one)
        rig.catch_up(follower)
        assert follower.blocks == held(rig.core, jobs) and follower.blocks
    assert follower.numbers == list(range(rig.num_sent)) and follower.num_removed > 20
    rig.core.kv.flush_cache()
    rig.catch_up(follower)
    assert not follower.blocks and follower.num_cleared == 1


def test_who_joins_late_is_told_all_and_the_others_again(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(CoreKnobs(num_pages=400, page_size=SIZE)))
    jobs = [job(rid) for rid in range(6)]
    first = rig.join()
    for one in jobs:
        rig.run(one)
    late = rig.join()
    rig.catch_up(first)
    assert late.blocks == first.blocks == held(rig.core, jobs)
    assert first.num_cleared == 2 and late.num_cleared == 1


def test_newcomers_don_t_make_a_node_tell_all_at_every_turn(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(CoreKnobs(num_pages=400, page_size=SIZE)))
    rig.join()
    rig.run(job(1))
    sent = rig.num_sent
    rig.followers += [Follower(rig.publisher.endpoint) for _ in range(3)]
    ends = time.monotonic() + HANG_GUARD_S
    while not rig.events._has_joined:
        assert time.monotonic() < ends
        list(rig.teller.tell(()))
    assert rig.num_sent == sent
    rig.now += LEAST_BETWEEN_S
    list(rig.teller.tell(()))
    assert rig.num_sent == sent + 1


class Comers:
    """Subscribers whose coming and going a test writes."""

    state = False, False

    def look_for_followers(self) -> tuple[bool, bool]:
        return self.state

    def publish(self, payload: bytes) -> None: ...


def test_subscribers_that_come_and_go_wait_for_their_pages() -> None:
    now, subscribers = 5.0, Comers()
    events = KvEvents(subscribers, SIZE, 0, lambda: now)
    seen = []
    for state, passes in (
        ((False, False), 0.0),
        ((True, True), 0.0),
        ((True, False), 0.0),
        ((False, False), 0.0),
        ((True, True), LEAST_BETWEEN_S / 2),
        ((True, False), LEAST_BETWEEN_S / 2),
        ((True, True), LEAST_BETWEEN_S / 2),
    ):
        now, subscribers.state = now + passes, state
        seen.append(events.look_for_followers())
    nobody, changes, all_pages = (False, False), (True, False), (True, True)
    assert seen == [nobody, all_pages, changes, nobody, nobody, all_pages, changes]


def test_nothing_is_written_while_nobody_follows(rigs: list[Rig]) -> None:
    """Not even for subscribers of other topics."""
    rigs.append(rig := Rig(CoreKnobs(num_pages=40, page_size=SIZE)))
    rig.run(job(1))
    assert not rig.num_sent and not rig.teller.has_more and rig.teller._outward is None
    rig.join()
    rig.followers.append(Follower(rig.publisher.endpoint, "other"))
    rig.followers.pop(0).close()
    ends = time.monotonic() + HANG_GUARD_S
    while rig.teller._outward is not None:
        assert time.monotonic() < ends
        list(rig.teller.tell(()))
    sent = rig.num_sent
    rig.run(job(2))
    assert rig.num_sent == sent


def test_what_is_salted_or_an_adapter_s_is_told_to_nobody(rigs: list[Rig]) -> None:
    """Followers know tokens only, so they would take it for others' prompts; and a salt is there to hide prompts."""
    rigs.append(rig := Rig(CoreKnobs(num_pages=400, page_size=SIZE, adapters=("blue",))))
    follower, plain = rig.join(), job(1)
    rig.run(plain)
    rig.run(job(2, cache_salt=7))
    rig.run(job(3, adapter="blue"))
    rig.catch_up(follower)
    mine = {hash_of(name) for name in rig.core.kv.cache.cached_names()}
    assert follower.blocks.keys() < mine and len(mine) > 2 * len(follower.blocks)
    assert max(follower.blocks.values(), key=len) == [*plain.prompt, *plain.expected()][: SIZE * len(follower.blocks)]
    rig.core.kv.flush_cache()
    rig.catch_up(follower)
    assert not follower.blocks


def test_of_windows_alone_pages_are_told_from_the_beginning(rigs: list[Rig]) -> None:
    """Where the page before is gone, a follower could not say what a page holds."""
    rigs.append(rig := Rig(CoreKnobs(num_pages=30, page_size=SIZE, window=17)))
    follower, jobs = rig.join(), [job(rid, window=17) for rid in range(20)]
    for one in jobs:
        rig.run(one)
        rig.catch_up(follower)
        known = held(rig.core, jobs)
        assert follower.blocks.items() <= known.items() and follower.blocks
    assert follower.num_removed > 20


def test_a_follower_that_reads_nothing_costs_only_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MOST_WAITING", 10)
    sender = Publisher("tcp://127.0.0.1:0", TOPIC)
    slow = Follower(sender.endpoint, most_unread=1)
    ends = time.monotonic() + HANG_GUARD_S
    while not sender.look_for_followers()[0]:
        assert time.monotonic() < ends
    payload = msgspec.msgpack.encode([1234.5, [["AllBlocksCleared"]], 0, "x" * (1 << 20)])
    for _ in range(200):
        sender.publish(payload)  # 200 MiB: more than sockets hold
    slow.socket.setsockopt(zmq.RCVTIMEO, 1000)
    with pytest.raises(zmq.Again):
        while True:
            slow.take_message()
    assert 10 <= len(slow.numbers) < 200 and slow.numbers == sorted(slow.numbers)
    slow.close()
    sender.close()


def test_hashes_suit_every_follower() -> None:
    """Some read signed 64 bits, and some no number that msgpack writes shorter."""
    for identity in (bytes(16), b"\xff" * 16, bytes(range(16))):
        assert 1 << 62 <= hash_of(identity) < 1 << 63
        assert len(msgspec.msgpack.encode(hash_of(identity))) == 9
    assert hash_of(bytes(7) + b"\x01" + bytes(8)) != hash_of(bytes(16))


@pytest.mark.parametrize("endpoint", ["127.0.0.1:5557", "tcp://127.0.0.1", "tcp://:5557", "tcp://a:70000", "ipc:///x"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-endpoint is .* must look like"):
        EventsConfig(endpoint)


def test_events_leave_the_machine_only_over_a_trusted_network() -> None:
    for endpoint in ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.5:5557", "tcp://[::]:5557"):
        with pytest.raises(ConfigError, match="token ids of prompts"):
            NodeParts(events=EventsConfig(endpoint))
        NodeParts(events=EventsConfig(endpoint), transfer=TransferConfig(trust_network=True))
    for endpoint in ("", "tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://localhost:0"):
        NodeParts(events=EventsConfig(endpoint))


def test_an_address_in_use_is_said() -> None:
    taken = Publisher("tcp://127.0.0.1:0", TOPIC)
    with pytest.raises(ConfigError, match="can't bind tcp://127.0.0.1:.*in use"):
        Publisher(taken.endpoint, TOPIC)
    taken.close()
