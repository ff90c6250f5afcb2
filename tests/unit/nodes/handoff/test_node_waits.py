"""Offers that wait at a decode node for longer than a lease: to wait is no failure, silence is one."""

from __future__ import annotations

import pytest

from shared.wire.messages import Key, Refuse, Wait
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.faulty_pair import ends_of, job
from tests.support.worlds.node_pair import LEASE_S, Net, assert_clean, expected, make_node, name_of

STEPS_PER_LEASE = 8


class FullDecodeNode:
    """A decode node with one row, which a request of its own holds and, once `stop`ped, does not leave."""

    def __init__(self) -> None:
        self.p = make_node("prefill", "p0", CoreKnobs(chunk_size=32, num_pages=64))
        self.d = make_node("decode", "d0", CoreKnobs(chunk_size=32, max_running=1))
        self.net = Net([self.p, self.d])
        self.holder = self.net.generate(self.d, job(0))
        self.net.run(until=lambda: bool(self.net.router.streams[self.holder]))
        self._step = self.d.ctx.core.loop.step
        self.d.ctx.core.loop.step = lambda block=False: False  # type: ignore[method-assign]

    def go_on(self) -> None:
        self.d.ctx.core.loop.step = self._step  # type: ignore[method-assign]
        self.net.run()

    def offer(self, count: int) -> list[Key]:
        keys = [self.net.generate(self.p, job(rid), self.d) for rid in range(1, count + 1)]
        self.net.run()
        return keys

    def pass_leases(self, count: float) -> None:
        for _ in range(int(count * STEPS_PER_LEASE)):
            self.net.at(LEASE_S / STEPS_PER_LEASE)
            self.net.run()


@pytest.fixture
def rig() -> FullDecodeNode:
    return FullDecodeNode()


def test_a_queue_longer_than_a_lease_fails_nobody(rig: FullDecodeNode) -> None:
    keys = rig.offer(5)
    rig.pass_leases(4)
    assert [ends_of(rig.net, key) for key in keys] == [[]] * 5
    rig.go_on()
    for rid, key in enumerate(keys, 1):
        assert rig.net.router.streams[key] == expected(job(rid)) and ends_of(rig.net, key) == [("length", "")]
    assert_clean(rig.p, rig.d)


def test_each_waiting_offer_is_told_now_and_each_quarter_lease(rig: FullDecodeNode) -> None:
    keys = rig.offer(40)
    assert waits_of(rig.net) == dict.fromkeys(keys, 1)
    rig.pass_leases(3)
    assert waits_of(rig.net) == dict.fromkeys(keys, 1 + 3 * 4)


def test_an_offer_without_room_is_not_matched_again_in_vain() -> None:
    """The defect: each round matched its whole prompt with the cache again, up to 19 ms for 131,072 tokens."""
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs(num_pages=12))
    net, kv = Net([p, d]), d.ctx.core.kv
    rows = [kv.alloc_row(f"holder {index}") for index in range(2)]
    assert kv.grow(rows[0], 6) and kv.grow(rows[1], 2)
    key = net.generate(p, job(1, 100), d)
    net.run()
    matches: list[int] = []
    find = kv.cache.find
    kv.cache.find = lambda keys, *args: (matches.append(len(keys)), find(keys, *args))[1]
    for _ in range(5):
        net.tick(name_of(d))
    assert kv.grow(rows[1], 1)
    net.tick(name_of(d))
    assert not matches, "there is no more memory than before"
    kv.release(rows[1])
    net.tick(name_of(d))
    assert len(matches) == 1 and not ends_of(net, key), "three pages more are too few"
    kv.release(rows[0])
    net.run()
    assert net.router.streams[key] == expected(job(1, 100))
    assert_clean(p, d)


def waits_of(net: Net) -> dict[Key, int]:
    counts: dict[Key, int] = {}
    for message in net.messages(Wait):
        assert isinstance(message, Wait)
        counts[message.key] = counts.get(message.key, 0) + 1
    return counts


def test_a_lease_of_silence_gives_an_offer_up(rig: FullDecodeNode) -> None:
    """Counted from the last word, not from the offer."""
    (key,) = rig.offer(1)
    rig.pass_leases(2)
    rig.net.drop = lambda source, target, message: isinstance(message, Wait)
    rig.pass_leases(0.75)
    assert not ends_of(rig.net, key)
    rig.pass_leases(0.5)
    assert ends_of(rig.net, key) == [("error", "handoff_failed")]
    rig.go_on()
    assert_clean(rig.p, rig.d)


def test_an_offer_whose_deadline_passes_is_refused(rig: FullDecodeNode) -> None:
    """Its prefill node holds pages for it, and its clock is another."""
    key = rig.net.generate(rig.p, job(1), rig.d, remaining_ms=5_000)
    rig.net.run()
    rig.net.at(5.0)
    rig.net.tick(name_of(rig.d))
    assert not rig.net.messages(Refuse), "at its deadline it is not late"
    rig.net.at(1.0)
    rig.net.tick(name_of(rig.d))
    assert [(message.key, message.code) for message in rig.net.messages(Refuse)] == [(key, "deadline_exceeded")]
    rig.go_on()
    assert set(ends_of(rig.net, key)) == {("error", "deadline_exceeded")}
    assert_clean(rig.p, rig.d)
