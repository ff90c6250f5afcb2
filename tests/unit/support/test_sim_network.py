"""The simulated network: what it keeps, what it loses, and what each end is told."""

from __future__ import annotations

import random

from msgspec.structs import replace

from shared.config.settings.silence import LinkSilence
from shared.wire.messages import Abort, Key, Message, Ready
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received, peer_name
from tests.support.sim.timers import Timers
from tests.support.sim.trace import Trace
from tests.support.sim.wire import Conn, Harshness, Network, Port
from tests.support.wire.wire_samples import INLINE

SILENCE = LinkSilence(ping_ms=500, timeout_ms=2500)
SILENCE_S = SILENCE.longest_s
FOR_LONG_S = 30.0  # of virtual time
NAME = peer_name("a", 1)


class Pair:
    """`a` dials `b`."""

    def __init__(self, limit: int = 100, seed: int = 1, connect_s: float = float("inf")) -> None:
        self.timers = Timers()
        self.net = Network(self.timers, random.Random(seed), Trace(), SILENCE, limit, connect_s)
        self.a = Port(self.net, "a", NAME, "tcp://a:1", lambda: None)
        self.b = Port(self.net, "b", peer_name("b", 1), "tcp://b:1", lambda: None)
        self.a.dial("b", "tcp://b:1")
        self.wait(0.1)
        assert self.a.poll() == [PeerUp("b")]

    @property
    def conn(self) -> Conn:
        return self.net.conns[-1]

    def wait(self, seconds: float) -> None:
        self.timers.run_until(self.timers.now + seconds)

    def talk(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            assert self.a.send("b", message(number))


def message(number: int) -> Abort:
    return Abort(Key("r", 1, str(number), 0, 0), False)


def pages(number: int) -> Ready:
    """A message with a part of its own for its page."""
    return replace(INLINE, key=Key("r", 1, str(number), 0, 0), pages=[4], generations=[1], digests=[8])


def numbers(inbound: list[Inbound]) -> list[int]:
    return [number_of(item.message) for item in inbound if isinstance(item, Received)]


def number_of(message: Message) -> int:
    return int(message.key.rid)  # type: ignore[attr-defined]


def closed(inbound: list[Inbound]) -> list[str]:
    return [item.peer for item in inbound if isinstance(item, PeerClosed)]


def test_messages_come_once_and_in_order() -> None:
    pair = Pair()
    pair.talk(50)
    pair.wait(1.0)
    assert numbers(pair.b.poll()) == list(range(50))
    assert pair.b.send(NAME, message(7))
    pair.wait(1.0)
    assert numbers(pair.a.poll()) == [7]


def test_a_partition_delays_and_a_long_one_closes_both_ends() -> None:
    pair = Pair()
    pair.net.blocked.add(frozenset("ab"))
    pair.talk(3)
    pair.wait(1.0)
    assert pair.b.poll() == []
    pair.net.heal()
    pair.wait(0.1)
    assert numbers(pair.b.poll()) == [0, 1, 2]
    pair.net.blocked.add(frozenset("ab"))
    pair.wait(SILENCE_S + 1.5)
    assert closed(pair.a.poll()) == ["b"] and closed(pair.b.poll()) == [NAME]


def test_a_broken_connection_loses_all_in_flight_from_some_point() -> None:
    losses = set()
    for seed in range(20):
        pair = Pair(seed=seed)
        pair.talk(5)
        pair.net.close(pair.conn, pair.conn.near, "was cut")
        pair.wait(2.0)
        got = numbers(pair.b.poll())
        assert got == sorted(set(got)), "in order, none twice"
        losses.add(5 - len(got))
    assert 0 in losses and len(losses) > 2, losses


def test_a_new_connection_takes_over_without_a_report() -> None:
    pair = Pair()
    pair.talk(1)
    pair.wait(0.1)
    pair.b.poll()
    pair.net.close(pair.conn, pair.conn.near, "is closed on one side", says_goodbye=False)
    pair.wait(0.2)  # dials again before the other end has looked
    assert pair.a.poll() == [PeerClosed("b"), PeerUp("b")]
    pair.talk(1)
    pair.wait(SILENCE_S)
    assert closed(pair.b.poll()) == []


def test_half_open_ends_when_the_other_end_asks() -> None:
    pair = Pair()
    pair.talk(1)
    pair.wait(0.1)
    pair.b.poll()
    pair.net.close(pair.conn, pair.conn.far, "is closed on one side", says_goodbye=False)
    assert closed(pair.b.poll()) == [NAME]
    pair.wait(1.0)
    assert pair.a.poll() == [PeerClosed("b"), PeerUp("b")]


def test_a_death_is_reported_last_and_late_if_its_host_is_dark() -> None:
    for in_the_dark, within in ((False, 1.0), (True, SILENCE_S + 1.5)):
        pair = Pair()
        pair.talk(1)
        pair.wait(0.1)
        if in_the_dark:
            pair.net.dark.add("a")
        pair.a.die(in_the_dark=in_the_dark)
        assert not closed(pair.b.poll()) or not in_the_dark
        pair.wait(within)
        assert closed(pair.b.poll()) == [NAME]


def test_a_slow_way_tells_only_of_messages_with_pages() -> None:
    pair = Pair()
    told: list[tuple[Message, frozenset[str]]] = []
    pair.net.on_slow = lambda message, hosts: told.append((message, hosts))
    pair.net.byte_s[frozenset("ab")] = 1e-4
    pair.talk(3)
    assert not told
    assert pair.a.send("b", pages(3), [b"p" * 256])
    assert told == [(pages(3), frozenset("ab"))]
    pair.net.heal()
    assert pair.a.send("b", pages(4), [b"p" * 256])
    assert len(told) == 1


def test_a_full_queue_refuses() -> None:
    pair = Pair(limit=5)
    pair.talk(5)
    assert not pair.a.send("b", message(5))
    pair.wait(0.5)
    assert not pair.a.send("b", message(5)), "delivered, but nobody reads"
    pair.b.poll()
    assert pair.a.send("b", message(5))
    assert not pair.b.send("c@1", message(6)), "nobody of that name"


def test_a_dialler_keeps_what_it_could_not_send_and_tries_again() -> None:
    pair = Pair()
    pair.b.die(in_the_dark=False)
    pair.wait(1.0)
    pair.talk(2)
    again = Port(pair.net, "b", peer_name("b", 2), "tcp://b:1", lambda: None)
    pair.wait(3.0)
    assert numbers(again.poll()) == [0, 1]
    assert pair.a.poll() == [PeerClosed("b"), PeerUp("b")]


def test_harsh_messages_are_lost_repeated_and_late() -> None:
    for harsh, holds in (
        (Harshness(drop=0.5), lambda got: len(got) < 100 and got == sorted(set(got))),
        (Harshness(repeat=0.5), lambda got: len(got) > 100 and set(got) == set(range(100))),
        (Harshness(reorder=0.5), lambda got: got != sorted(got) and set(got) == set(range(100))),
    ):
        pair = Pair(limit=1000)
        pair.net.harsh = harsh
        pair.talk(100)
        pair.wait(5.0)
        assert holds(numbers(pair.b.poll())), harsh


def test_a_one_way_link_ends_at_its_deaf_end_and_no_dial_works() -> None:
    pair = Pair()
    pair.net.one_way.add(("a", "b"))
    pair.talk(1)
    pair.wait(SILENCE_S - 1.0)
    assert pair.b.poll() == [] and pair.a.poll() == []
    pair.wait(2.0)
    assert closed(pair.a.poll()) == ["b"], "the end that hears nothing hangs up, and the way back is open"
    pair.wait(FOR_LONG_S)
    assert pair.a.poll() == [] and pair.net.events["dial never answered"] == 1


def test_unanswered_dials_leave_living_connections_alone() -> None:
    pair = Pair()
    pair.net.unanswered.add(("a", "b"))
    pair.talk(1)
    pair.wait(1.0)
    assert numbers(pair.b.poll()) == [0]
    pair.net.close(pair.conn, pair.conn.near, "was cut")
    pair.wait(FOR_LONG_S)
    assert pair.a.poll() == [PeerClosed("b")]
    pair.net.heal()
    pair.wait(2.0)
    assert pair.a.poll() == [PeerUp("b")]


def test_a_dial_is_given_up_after_its_time_and_goes_on() -> None:
    pair = Pair(connect_s=SILENCE_S)
    pair.net.unanswered.add(("a", "c"))
    pair.a.dial("c", "tcp://c:1")
    pair.wait(SILENCE_S - 0.5)
    assert pair.a.poll() == []
    pair.wait(2.0)
    assert pair.a.poll() == [PeerClosed("c")]
    Port(pair.net, "c", peer_name("c", 1), "tcp://c:1", lambda: None)
    pair.net.heal()
    pair.wait(2.0)
    assert pair.a.poll() == [PeerUp("c")]


def test_a_stuffed_path_refuses_on_both_ends() -> None:
    pair = Pair()
    pair.talk(1)
    pair.wait(0.1)
    pair.b.poll()
    pair.net.stuffed.add(pair.conn)
    assert not pair.a.send("b", message(1)) and not pair.b.send(NAME, message(2))
    pair.net.heal()
    assert pair.a.send("b", message(1)) and pair.b.send(NAME, message(2))


def test_a_message_cut_midway_is_lost_whole_with_its_connection() -> None:
    """What has one part only never is."""
    arrived = set()
    for seed in range(20):
        pair = Pair(seed=seed)
        pair.net.cut_within.add(frozenset("ab"))
        pair.talk(2)
        assert pair.a.send("b", pages(2), (b"1234",))
        pair.wait(2.0)
        got = numbers(pair.b.poll())
        assert 2 not in got and got == sorted(got)
        arrived.add(len(got))
        assert pair.a.poll() == [PeerClosed("b"), PeerUp("b")]
        assert pair.a.send("b", pages(3), (b"1234",))
        pair.wait(1.0)
        assert numbers(pair.b.poll()) == [3]
    assert len(arrived) > 1


def test_an_unsent_message_of_several_parts_may_be_lost() -> None:
    """Sent again it would begin in its middle."""
    kept = set()
    for seed in range(40):
        pair = Pair(seed=seed)
        for number in range(3):
            assert pair.a.send("b", pages(number), (b"1234",))
        pair.net.close(pair.conn, pair.conn.near, "was cut")
        pair.wait(2.0)
        kept.add(len(numbers(pair.b.poll())))
        assert pair.net.events["half a message dropped"] <= 1
    assert kept >= {1, 2, 3}
