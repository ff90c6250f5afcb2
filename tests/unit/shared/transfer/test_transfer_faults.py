"""What two nodes make of each transport when something goes wrong: order, duplicates, aborts, deaths, bad pages, slow
peers. Process groups are twins in this process here, so that every order of events can be had; real ones are in
test_transfer_groups.py.

Each test ends with the same two questions: has every request that can still be heard ended once and rightly, and is
every page, row and book of the living nodes as before?
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from decode_node.side import DecodeSide
from prefill_node.side import PrefillSide
from shared.core.sampling_params import SamplingParams
from shared.node.loop.group_table import MOST_POSTED, WINDOW
from shared.node.loop.node import Node
from shared.node.records.mail import Outgoing
from shared.wire.messages import (
    Abort,
    Broken,
    Failed,
    Generate,
    Grant,
    Installed,
    Join,
    Key,
    Offer,
    Prebuilt,
    Ready,
    StoreEntry,
    Take,
    Tokens,
)
from shared.wire.peers import PeerClosed
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.cores.hand_driven import HandDriven
from tests.support.cores.twin_groups import TwinGroup
from tests.support.worlds.node_pair import LEASE_S, Net, assert_clean, expected, make_node, name_of

LONG = SamplingParams(max_tokens=12, temperature=0.0)
RELAY = (Offer, Grant, Ready, Prebuilt, Installed)
PAIRING = (Join, StoreEntry, Take)
TRANSPORTS = ("shm", "zmq", "gloo")
NUM_MESSAGES = {"shm": 21, "zmq": 21, "gloo": 33}  # of three hand-offs, checked below


def kinds_of(transport: str) -> tuple[type, ...]:
    return (*RELAY, *PAIRING) if transport == "gloo" else RELAY


def job(rid: int = 0, length: int = 70, sampling: SamplingParams = LONG) -> Job:
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), sampling, rid + 7)


class Pairs:
    """Makes pairs of nodes, and closes their memory in the end."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __call__(self, transport: str, **changes: object) -> tuple[Node, Node]:
        knobs = replace(CoreKnobs(chunk_size=32), **changes)
        made = tuple(
            make_node(role, name, knobs, transport=transport) for role, name in (("prefill", "p0"), ("decode", "d0"))
        )
        self.nodes += made
        return made


@pytest.fixture
def pair() -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    for node in pairs.nodes:
        node.side.close()
        node.ctx.core.close()


def ends_of(net: Net, key: Key) -> list[tuple[str, str]]:
    return [(end.reason, end.error_code) for end in net.router.ends[key]]


def group_of(node: Node) -> TwinGroup:
    """The process group that this node has with its only peer."""
    side = node.side
    table = side.groups.table if isinstance(side, PrefillSide) else side.transfers.groups.table
    (one,) = table
    assert isinstance(one.group, TwinGroup)
    return one.group


# ---- order and duplicates


@pytest.mark.rule("I9")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", range(8))
def test_ready_and_prebuilt_in_any_order(pair: Pairs, transport: str, seed: int) -> None:
    p, d = pair(transport, width=1 + 3 * (seed % 2))
    net = Net([p, d], seed)
    net.hold = lambda src, dst, message: isinstance(message, Ready | Prebuilt)
    jobs = [job(rid) for rid in range(3)]
    keys = [net.generate(p, one, d) for one in jobs]
    net.run()
    assert not net.messages(Installed)
    net.hold = lambda src, dst, message: False
    net.release_held(shuffle=True)
    net.run()
    assert [net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert_clean(p, d)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("missing", [Ready, Prebuilt, Take])
def test_nothing_is_installed_before_pages_and_record_are_here(pair: Pairs, transport: str, missing: type) -> None:
    p, d = pair(transport)
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, missing) and not getattr(message, "first_page", 0)
    key = net.generate(p, job(), d)
    net.run()
    assert bool(net.messages(Installed)) == (missing not in kinds_of(transport))
    net.release_held()
    net.hold = lambda src, dst, message: False
    net.run()
    assert net.router.streams[key] == expected(job())
    assert_clean(p, d)


DOUBLED = [(name, kind) for name in TRANSPORTS for kind in (Generate, *kinds_of(name))]


@pytest.mark.rule("H20", "I9")
@pytest.mark.parametrize(("transport", "kind"), DOUBLED)
def test_duplicates_change_nothing(pair: Pairs, transport: str, kind: type) -> None:
    p, d = pair(transport)
    net = Net([p, d])
    carried: list[tuple[str, Outgoing]] = []
    plain = net.deliver

    def twice(source: str, action: Outgoing) -> None:
        plain(source, action)
        if isinstance(action.message, kind):
            plain(source, action)
            carried.append((source, action))

    net.deliver = twice  # type: ignore[method-assign]
    key = net.generate(p, job(), d)
    if kind is Generate:
        net.generate(p, job(), d)
    net.run()
    assert carried or kind is Generate
    for source, action in carried:  # and once more when all is over
        plain(source, action)
    if kind is Generate:
        net.generate(p, job(), d)
    net.run()
    assert net.router.streams[key] == expected(job())
    assert ends_of(net, key) == [("length", "")]
    assert len(net.messages(Installed)) == (3 if kind is Installed else 1)
    assert not net.messages(Broken)
    assert_clean(p, d)


# ---- aborts

AT = [(name, kind) for name in TRANSPORTS for kind in (*kinds_of(name), Tokens)]


@pytest.mark.parametrize(("transport", "at"), AT)
@pytest.mark.parametrize("whom", ["prefill", "decode", "both"])
@pytest.mark.parametrize("all_sequences", [True, False])
def test_abort_in_every_phase(pair: Pairs, transport: str, at: type, whom: str, all_sequences: bool) -> None:
    """The abort arrives right after the first message of a kind went out."""
    p, d = pair(transport)
    net = Net([p, d])
    fired: list[Key] = []

    def abort(src: str, dst: str, message: object) -> None:
        if isinstance(message, at) and not fired:
            fired.append(key)
            for node in {"prefill": [p], "decode": [d], "both": [p, d]}[whom]:
                net.abort(node, key, all_sequences)

    net.on_message = abort
    other = net.generate(p, job(1), d)
    key = net.generate(p, job(0), d)
    net.run()
    assert fired
    assert net.router.streams[other] == expected(job(1)), "the neighbour goes on"
    assert ends_of(net, other) == [("length", "")]
    assert not net.messages(Broken), "what was agreed upon is carried out, whoever wanted it"
    assert_clean(p, d)


def test_a_transfer_in_flight_goes_on_and_later_ones_keep_order(pair: Pairs) -> None:
    p, d = pair("gloo", num_pages=30)
    net = Net([p, d])
    key = net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Take)))
    group_of(p).open = False  # it has begun, and the peer is slow
    net.run()
    assert d.ctx.core.kv.gauges()["granted"] == 5
    net.abort(d, key)
    net.run()
    assert d.ctx.core.kv.gauges()["granted"] == d.ctx.core.kv.gauges()["held"] == 0, "nothing writes into its pages"
    later = net.generate(p, job(1), d)
    net.run()
    assert not net.router.ends[later]
    group_of(p).open = True
    group_of(p).move()
    net.run()
    assert net.router.streams[later] == expected(job(1))
    assert not net.messages(Broken)
    assert_clean(p, d)


def test_pages_for_an_ended_request_are_written_nowhere(pair: Pairs) -> None:
    """Its row and pages are somebody else's by then."""
    p, d = pair("gloo")
    net = Net([p, d])
    key = net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Take)))
    (handoff,) = d.side.transfers.open.values()
    group_of(p).open = False
    net.run()
    net.abort(d, key)
    net.run()
    own = net.generate(d, job(1, sampling=replace(LONG, max_tokens=60)))
    net.run(until=lambda: len(net.router.streams[own]) > 5)
    assert handoff.row in {request.row for request in d.ctx.core.queues.requests.values()}
    group_of(p).open = True
    group_of(p).move()
    net.run()
    assert net.router.streams[own] == job(1, sampling=replace(LONG, max_tokens=60)).expected()
    assert not net.messages(Broken)
    assert_clean(p, d)


# ---- deaths


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_number_of_messages_to_die_at(pair: Pairs, transport: str) -> None:
    p, d = pair(transport)
    net = Net([p, d])
    for rid in range(3):
        net.generate(p, job(rid), d)
    net.run()
    assert sum(isinstance(message, kinds_of(transport)) for _, _, message in net.seen) == NUM_MESSAGES[transport]


@pytest.mark.parametrize(("transport", "when"), [(name, n) for name in TRANSPORTS for n in range(NUM_MESSAGES[name])])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_death_at_every_message(pair: Pairs, transport: str, when: int, who: str) -> None:
    p, d = pair(transport)
    net = Net([p, d])
    victim, survivor = (p, d) if who == "prefill" else (d, p)
    seen = 0

    def strike(src: str, dst: str, message: object) -> None:
        nonlocal seen
        seen += isinstance(message, kinds_of(transport))
        if seen == when + 1 and name_of(victim) not in net.dead:
            net.kill(victim)

    net.on_message = strike
    keys = [net.generate(p, job(rid), d) for rid in range(3)]
    net.run()
    assert net.dead
    for rid, key in enumerate(keys):
        assert expected(job(rid))[: len(net.router.streams[key])] == net.router.streams[key]
        for end in net.router.ends[key]:
            assert (end.reason, end.error_code) in (("length", ""), ("error", "peer_unreachable"))
            if end.reason == "length":
                assert net.router.streams[key] == expected(job(rid))
    if who == "decode":
        assert all(net.router.ends[key] for key in keys if not handed_over(net, key)), "each gets a clear error"
    assert_clean(survivor)


def handed_over(net: Net, key: Key) -> bool:
    return any(message.key == key for message in net.messages(Installed))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_life_of_a_dead_peer_is_served(pair: Pairs, transport: str) -> None:
    p, d = pair(transport)
    again = make_node("decode", "d0", CoreKnobs(), epoch=2, transport=transport)
    pair.nodes.append(again)
    net = Net([p, d, again])
    net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Ready)))
    net.kill(d)
    key = net.generate(p, job(1), again)
    net.run()
    assert net.router.streams[key] == expected(job(1))
    assert_clean(p, again)


def test_a_mute_peer_is_aborted_only_once_it_is_proven_dead(pair: Pairs) -> None:
    """Its machine lost its power: a transfer would wait for ever. Before the proof nothing is given up."""
    p, d = pair("gloo")
    net = Net([p, d])
    net.generate(p, job(), d)
    net.run(until=lambda: bool(net.messages(Take)))
    ours = group_of(d)
    ours.open = False
    group_of(p).vanish()
    net.dead.add(name_of(p))
    net.run()
    assert not ours.error
    net.inboxes[name_of(d)].append(PeerClosed(name_of(p)))
    net.run()
    assert "is gone" in str(ours.error)
    assert_clean(d)


def test_a_broken_group_fails_its_transfers_and_the_next_works(pair: Pairs) -> None:
    p, d = pair("gloo")
    net = Net([p, d])
    bad = net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Take)))
    group_of(p).open = False
    net.run()
    group_of(p).reset("the cable was pulled")
    net.run()
    assert ends_of(net, bad) == [("error", "handoff_failed")]
    assert "the cable was pulled" in net.router.end(bad).error_message
    good = net.generate(p, job(1), d)
    net.run()
    assert net.router.streams[good] == expected(job(1))
    assert [join.group for join in net.messages(Join)] == [1, 2]
    assert_clean(p, d)


def test_a_take_that_was_lost_costs_its_group_and_no_more(pair: Pairs) -> None:
    """No network of ours loses a message and goes on; if one did, the next Take would not fit."""
    p, d = pair("gloo")
    net = Net([p, d])
    lost: list[Take] = []

    def once(src: str, dst: str, message: object) -> bool:
        if isinstance(message, Take) and not lost:
            lost.append(message)
            return True
        return False

    net.drop = once
    keys = [net.generate(p, job(rid), d) for rid in range(2)]
    net.run()
    assert net.messages(Broken) and all(ends_of(net, key) for key in keys)
    later = net.generate(p, job(3), d)
    net.run()
    assert net.router.streams[later] == expected(job(3))
    assert_clean(p, d)


@pytest.mark.rule("H41")
@pytest.mark.parametrize(("transport", "lost"), [(name, kind) for name in TRANSPORTS for kind in RELAY])
def test_a_hand_off_that_stalls_is_given_up(pair: Pairs, transport: str, lost: type) -> None:
    """One message is lost for good; the lease ends what it would have gone on with."""
    p, d = pair(transport)
    net = Net([p, d])
    net.drop = lambda src, dst, message: isinstance(message, lost)
    key = net.generate(p, job(), d)
    net.run()
    for _ in range(12):
        net.at(LEASE_S / 4)
        net.run()
    if lost is not Installed:
        assert ("error", "handoff_failed") in ends_of(net, key)
    assert_clean(p, d)


# ---- slow peers


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_slow_peer_keeps_nobody_else_waiting(pair: Pairs, transport: str, who: str) -> None:
    """Its pages are neither described nor pulled for a long time: local requests of both nodes go on."""
    p, d = pair(transport)
    stream, core = HandDriven(), (p if who == "prefill" else d).ctx.core
    core.streams = core.engine.streams = replace(core.streams, transfer=stream)
    stream.open = False
    net = Net([p, d])
    slow = net.generate(p, job(0), d)
    net.run()
    assert not net.messages(Installed)
    local = [net.generate(node, job(rid)) for rid, node in ((1, p), (2, d))]
    net.run()
    assert [net.router.streams[key] for key in local] == [expected(job(1)), expected(job(2))]
    assert not net.router.ends[slow]
    stream.open = True
    stream.run()
    net.run()
    assert net.router.streams[slow] == expected(job(0))
    assert_clean(p, d)


def test_staging_is_bounded_however_slow_the_other_side_is(pair: Pairs) -> None:
    p, d = pair("gloo", page_size=4, chunk_size=8, num_pages=200)
    net = Net([p, d])
    keys = [net.generate(p, job(rid), d) for rid in range(4)]
    net.run(until=lambda: bool(net.messages(Take)))
    group_of(p).open = False
    net.run()
    assert len(net.messages(Ready)) > 5 * WINDOW
    assert len(net.messages(Take)) == WINDOW
    assert len(group_of(p).posted) == len(group_of(d).posted) == WINDOW
    group_of(p).open = True
    group_of(p).move()
    net.run()
    assert [net.router.streams[key] for key in keys] == [expected(job(rid)) for rid in range(4)]
    assert_clean(p, d)


def test_a_sender_told_late_of_its_own_transfers_keeps_its_group(pair: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its thread may be far behind the receiver's. What it does not post meanwhile the receiver
    can't have: so more than a window of that is asked for by nobody who keeps to the rules."""
    p, d = pair("gloo", page_size=4, chunk_size=8, num_pages=200)
    net = Net([p, d])
    keys = [net.generate(p, job(rid), d) for rid in range(3)]
    net.run(until=lambda: bool(net.messages(Take)))
    late = group_of(p)
    with monkeypatch.context() as patch:
        patch.setattr(late, "take_finished", list)
        net.run()
        assert len(net.messages(Take)) == MOST_POSTED + WINDOW
        assert not net.messages(Broken)
    net.run()
    assert [net.router.streams[key] for key in keys] == [expected(job(rid)) for rid in range(3)]
    assert not net.messages(Broken)
    assert_clean(p, d)


def test_a_peer_that_asks_beyond_what_can_begin_loses_its_group(pair: Pairs) -> None:
    p, d = pair("gloo", page_size=4, chunk_size=8, num_pages=200)
    net = Net([p, d])
    key = net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Take)))
    group_of(p).open = False
    net.run()
    for order in range(WINDOW, MOST_POSTED + WINDOW):
        net.to_node(name_of(p), Take(1, order, [1], 0, 0), name_of(d))
    net.run()
    assert len(group_of(p).posted) == MOST_POSTED and not net.messages(Broken)
    net.to_node(name_of(p), Take(1, MOST_POSTED + WINDOW, [1], 0, 0), name_of(d))
    net.run()
    assert net.messages(Broken)
    assert ends_of(net, key)[0][1] == "handoff_failed"
    assert_clean(p, d)


# ---- bad pages


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_page_that_changed_on_the_way_fails_its_request_only(pair: Pairs, transport: str) -> None:
    p, d = pair(transport)
    net = Net([p, d])

    def corrupt(src: str, dst: str, message: object) -> None:
        if isinstance(message, Ready) and message.key.rid == "r0" and message.pages:
            p.ctx.core.pool.page_view(message.pages[0])[3] ^= 1

    net.on_message = corrupt
    bad, good = net.generate(p, job(0), d), net.generate(p, job(1), d)
    net.run()
    assert set(ends_of(net, bad)) == {("error", "handoff_failed")}
    assert "digest" in net.router.end(bad).error_message
    assert net.messages(Failed)
    assert net.router.streams[good] == expected(job(1))
    assert_clean(p, d)


@pytest.mark.parametrize(("transport", "told_by"), [("shm", "generation"), ("gloo", "digest")])
def test_a_page_with_a_new_owner_fails_the_pull(pair: Pairs, transport: str, told_by: str) -> None:
    """The prefill node forgets a request and reuses its pages before they are pulled."""
    p, _ = pair(transport, prefix_cache=False, num_pages=12)
    d = make_node("decode", "d0", CoreKnobs(chunk_size=32, prefix_cache=False), transport=transport)
    pair.nodes.append(d)
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, Ready)
    net.drop = lambda src, dst, message: isinstance(message, Abort)
    bad = net.generate(p, job(0), d)
    net.run()
    net.abort(p, bad)  # the decode node does not hear of it
    net.run()
    net.generate(p, job(1))
    net.run()
    net.hold = lambda src, dst, message: False
    net.release_held()
    net.run()
    assert told_by in net.messages(Failed)[0].reason
    assert not net.router.ends[bad], "the prefill node was told to end it: nobody waits for a word"
    assert_clean(p, d)


# ---- a peer gone mad


@pytest.mark.parametrize(
    "changes",
    [
        {"order": 7}, {"pages": []}, {"pages": [0]}, {"pages": [10**6]}, {"num_layers": 3}, {"first_layer": 2},
        {"pages": [1] * 4000},
    ],
)  # fmt: skip
def test_a_senseless_take_ends_its_group(pair: Pairs, changes: dict[str, object]) -> None:
    p, d = pair("gloo", page_size=256, num_pages=30)
    net = Net([p, d])
    net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Grant)))
    net.to_node(name_of(p), replace_fields(Take(1, 0, [1], 0, 0), changes), name_of(d))
    net.run()
    assert [message.group for message in net.messages(Broken)]
    later = net.generate(p, job(1), d)
    net.run()
    assert net.router.streams[later] == expected(job(1))
    assert_clean(p, d)


def replace_fields(take: Take, changes: dict[str, object]) -> Take:
    return Take(**{name: changes.get(name, getattr(take, name)) for name in take.__struct_fields__})


def test_strangers_to_a_group_are_answered_or_not_heard(pair: Pairs) -> None:
    p, d = pair("gloo")
    net = Net([p, d])
    peer = name_of(d)
    for message in (Take(9, 0, [1], 0, 0), StoreEntry(9, "0/0", b"x"), Broken(9, "why not"), Join("zmq", 3)):
        net.to_node(name_of(p), message, peer)
    for message in (StoreEntry(9, "0/1", b"x"), Broken(9, "why not")):
        net.to_node(name_of(d), message, name_of(p))
    net.run()
    assert [message.group for message in net.messages(Broken)] == [9, 3]
    key = net.generate(p, job(), d)
    net.run()
    assert net.router.streams[key] == expected(job())
    assert isinstance(d.side, DecodeSide)
    assert_clean(p, d)
