"""Offers that wait at a decode node for longer than a lease: to wait is no failure, silence is one."""

from __future__ import annotations

import pytest

from prefill_node.handoff_out import HandoffOut
from prefill_node.side import PrefillSide
from shared.node.loop.node import Node
from shared.wire.codec import key_of
from shared.wire.messages import Grant, Key, Refuse, Wait
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.faulty_pair import ends_of, job, linked
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


# ---- prompts that gave their memory away


LENGTH = 100  # 20 chunks, 10 ticks, 7 pages: memory for one prompt only
MAX_ROUNDS = 60  # by then it has been computed again


@pytest.mark.parametrize("layer_ends", [(), (1,)])
def test_a_late_grant_finds_only_what_the_second_life_computed(layer_ends: tuple[int, ...]) -> None:
    """Nothing of the first life may go out: not its record, no layers, and no page that is not full again."""
    computed = [granted_after(rounds, layer_ends) for rounds in range(MAX_ROUNDS)]
    assert computed[0] == 0 and computed[-1] == LENGTH, "from its beginning to its end"
    assert any(num_tokens % 16 for num_tokens in computed[1:-1]), "in the middle of a page too"


def granted_after(rounds: int, layer_ends: tuple[int, ...]) -> int:
    """Return how many tokens were computed again when the grant came."""
    net, p, d = linked(num_pages=12, chunk_size=5, prefix_cache=False, layer_ends=layer_ends)
    net.hold = lambda source, target, message: isinstance(message, Grant)
    one = job(1, LENGTH)
    key = net.generate(p, one, d)
    net.run()
    give_way(net, p, key)
    for _ in range(rounds):
        net.tick(name_of(p))
    num_tokens = handoff_of(p, key).num_final_tokens
    net.let_go()
    net.run()
    assert ends_of(net, key) == [("length", "")], f"granted after {rounds} rounds"
    assert net.router.streams[key] == expected(one)
    assert_clean(p, d)
    return num_tokens


def give_way(net: Net, p: Node, key: Key) -> None:
    """To a prompt that stays at the prefill node."""
    handoff = handoff_of(p, key)
    assert handoff.record is not None
    net.generate(p, job(2, LENGTH), None)
    net.run(until=lambda: handoff.request.incarnation == 1)


def handoff_of(p: Node, key: Key) -> HandoffOut:
    assert isinstance(p.side, PrefillSide)
    handoff = p.side.bootstrap.find_handoff(key_of(key))
    assert handoff is not None
    return handoff
