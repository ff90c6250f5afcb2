"""Two nodes and everything that can go wrong between them: order, duplicates, aborts, refusals, deaths, old epochs.

Each test ends with the same two questions: has every request that can still be heard ended once and rightly, and is
every page, row and book of the living nodes as before?
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from pair import LEASE_S, ROUTER, ROUTER_ID, Net, assert_clean, expected, make_node, name_of, sibling
from rig import CoreKnobs, Job

from shared.core.sampling_params import SamplingParams
from shared.handoff.mail import Dial, HangUp, Outgoing
from shared.handoff.node import Node
from shared.wire.messages import (
    Abort,
    Failed,
    Generate,
    Grant,
    Installed,
    Key,
    Offer,
    Prebuilt,
    Ready,
    Refuse,
    Tokens,
    Wait,
    Welcome,
)
from shared.wire.peers import PeerClosed, PeerUp, Received

LONG = SamplingParams(max_tokens=12, temperature=0.0)
RELAY = (Offer, Grant, Ready, Prebuilt, Installed)


def job(rid: int = 0, length: int = 70, sampling: SamplingParams = LONG) -> Job:
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), sampling, rid + 7)


def pair(**changes: object) -> tuple[Node, Node]:
    knobs = replace(CoreKnobs(chunk_size=32), **changes)
    return make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)


def counters(node: Node) -> dict[str, float]:
    return node.ctx.metrics.counters()


def ends_of(net: Net, key: Key) -> list[tuple[str, str]]:
    return [(end.reason, end.error_code) for end in net.router.ends[key]]


# ---- order and duplicates


@pytest.mark.parametrize("seed", range(12))
def test_ready_and_prebuilt_in_any_order(seed: int) -> None:
    p, d = pair(width=1 + 3 * (seed % 2))
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


@pytest.mark.parametrize("missing", [Ready, Prebuilt])
def test_nothing_is_installed_before_pages_and_record_are_here(missing: type) -> None:
    p, d = pair()
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, missing) and not getattr(message, "first_page", 0)
    key = net.generate(p, job(), d)
    net.run()
    assert not net.messages(Installed)
    net.release_held()
    net.run()
    assert net.router.streams[key] == expected(job())
    assert_clean(p, d)


@pytest.mark.parametrize("kind", [Generate, *RELAY])
def test_duplicates_change_nothing(kind: type) -> None:
    p, d = pair()
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
    for source, action in carried:  # and once more when all is over
        plain(source, action)
    if kind is Generate:
        net.generate(p, job(), d)
    net.run()
    assert net.router.streams[key] == expected(job())
    assert ends_of(net, key) == [("length", "")]
    assert len(net.messages(Installed)) == (3 if kind is Installed else 1)
    assert_clean(p, d)


# ---- aborts


@pytest.mark.parametrize("at", [*RELAY, Tokens])
@pytest.mark.parametrize("whom", ["prefill", "decode", "both"])
@pytest.mark.parametrize("all_sequences", [True, False])
def test_abort_in_every_phase(at: type, whom: str, all_sequences: bool) -> None:
    """The abort arrives right after the first message of a kind went out."""
    p, d = pair()
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
    assert_clean(p, d)


def test_an_abort_may_overtake_its_offer() -> None:
    p, d = pair()
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, Offer)
    key = net.generate(p, job(), d)
    net.run()
    net.abort(d, key, all_sequences=True)
    net.run()
    net.release_held()
    net.run()
    assert not net.messages(Grant) and len(net.messages(Refuse)) == 1
    assert_clean(p, d)


def test_an_abort_may_overtake_its_generate() -> None:
    p, d = pair()
    net = Net([p, d])
    net.abort(p, Key(ROUTER_ID, 1, "r0", 0, 0), all_sequences=True)
    key = net.generate(p, job(), d, num_sequences=2)
    net.run()
    assert not net.messages(Offer) and not net.router.streams[key]
    retry = net.generate(p, job(), d, attempt=1)
    net.run()
    assert net.router.streams[retry] == expected(job()), "another attempt is another key"
    assert_clean(p, d)


def test_abort_of_one_sequence_leaves_its_siblings() -> None:
    p, d = pair()
    net = Net([p, d])
    key = net.generate(p, job(sampling=replace(LONG, temperature=0.8)), d, num_sequences=3)
    net.on_message = lambda src, dst, m: net.abort(d, sibling(key, 0)) if isinstance(m, Installed) else None
    net.run()
    for index in (1, 2):
        assert net.router.streams[sibling(key, index)] == expected(job(sampling=replace(LONG, temperature=0.8)), index)
    assert_clean(p, d)


def test_abort_of_all_sequences_behind_their_leader() -> None:
    p, d = pair()
    net = Net([p, d])
    key = net.generate(p, job(), d, num_sequences=3)
    net.on_message = lambda src, dst, m: net.abort(p, key, True) if isinstance(m, Grant) else None
    net.run()
    assert len(net.messages(Offer)) == 1 and not net.router.ends[key]
    assert_clean(p, d)


# ---- refusals


def refused(net: Net, key: Key, words: str) -> None:
    (end,) = net.router.ends[key]
    assert (end.reason, end.error_code) == ("error", "handoff_failed")
    assert words in end.error_message


def test_a_refusal_names_the_field_that_differs() -> None:
    p, d = pair()
    d.ctx.facts = replace(d.ctx.facts, fingerprint=replace_struct(d.ctx.facts.fingerprint, weights="others"))
    net = Net([p, d])
    key = net.generate(p, job(), d)
    net.run()
    refused(net, key, "weights differs: others here")
    assert_clean(p, d)


def replace_struct(struct: object, **changes: object) -> object:
    import msgspec

    return msgspec.structs.replace(struct, **changes)


def test_another_build_is_no_reason_to_refuse() -> None:
    p, d = pair()
    d.ctx.facts = replace(d.ctx.facts, fingerprint=replace_struct(d.ctx.facts.fingerprint, build="newer"))
    net = Net([p, d])
    key = net.generate(p, job(), d)
    net.run()
    assert net.router.streams[key] == expected(job())


def test_no_common_transport_is_refused() -> None:
    p = make_node("prefill", "p0", CoreKnobs(), transport="zmq")
    d = make_node("decode", "d0", CoreKnobs(), transport="shm")
    net = Net([p, d])
    key = net.generate(p, job(), d)
    net.run()
    refused(net, key, "no transport")
    assert_clean(p, d)


def test_what_can_never_fit_is_refused_at_once() -> None:
    p = make_node("prefill", "p0", CoreKnobs())
    d = make_node("decode", "d0", CoreKnobs(num_pages=5))
    net = Net([p, d])
    key = net.generate(p, job(), d)
    net.run()
    refused(net, key, "never fit")
    assert_clean(p, d)


def test_a_draining_node_takes_nothing_new_and_finishes_the_rest() -> None:
    p, d = pair()
    net = Net([p, d])
    first = net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Installed)))
    d.ctx.draining = True
    second = net.generate(p, job(1), d)
    net.run()
    assert net.router.streams[first] == expected(job(0))
    refused(net, second, "shutting down")
    p.ctx.draining = True
    third = net.generate(p, job(2), d)
    net.run()
    assert ends_of(net, third) == [("error", "node_lost")]
    assert_clean(p, d)


def test_ids_beyond_the_vocabulary_fail_one_request_only() -> None:
    p, d = pair()
    net = Net([p, d])
    bad = net.generate(p, replace(job(0), prompt=(1, 96, 2)), d)
    worse = net.generate(d, job(3, sampling=replace(LONG, logit_bias=((4000, 1.0),))))
    good = net.generate(p, job(1), d)
    net.run()
    assert ends_of(net, bad) == ends_of(net, worse) == [("error", "invalid_request_error")]
    assert net.router.streams[good] == expected(job(1))
    assert_clean(p, d)


def test_too_many_waiting_requests_are_turned_away() -> None:
    p, d = pair()
    for node in (p, d):
        node.ctx.facts = replace(node.ctx.facts, max_waiting=2)
    net = Net([p, d])
    keys = [net.generate(p, job(rid), d) for rid in range(5)]
    net.run()
    codes = [end for key in keys for end in ends_of(net, key)]
    assert codes.count(("error", "overloaded")) == 3
    assert_clean(p, d)


# ---- failures of the transfer


def test_a_page_that_changed_on_the_way_fails_its_request_only() -> None:
    p, d = pair()
    net = Net([p, d])
    plain = net.deliver

    def corrupt(source: str, action: Outgoing) -> None:
        if isinstance(action.message, Ready) and action.message.key.rid == "r0" and action.frames:
            action = replace(action, frames=[bytes(len(frame)) for frame in action.frames])
        plain(source, action)

    net.deliver = corrupt  # type: ignore[method-assign]
    bad, good = net.generate(p, job(0), d), net.generate(p, job(1), d)
    net.run()
    assert {end for end in ends_of(net, bad)} == {("error", "handoff_failed")}
    assert "digest" in net.router.end(bad).error_message
    assert net.messages(Failed)
    assert net.router.streams[good] == expected(job(1))
    assert_clean(p, d)


def test_a_page_with_a_new_owner_fails_the_pull() -> None:
    """The generation check: the prefill node forgets a request and reuses its pages before they are pulled."""
    knobs = CoreKnobs(chunk_size=32, prefix_cache=False, num_pages=12)
    p = make_node("prefill", "p0", knobs, transport="shm")
    d = make_node("decode", "d0", replace(knobs, num_pages=100), transport="shm")
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, Ready)
    net.drop = lambda src, dst, message: isinstance(message, Abort)
    bad = net.generate(p, job(0), d)
    net.run()
    net.abort(p, bad)  # the decode node does not hear of it
    net.run()
    net.generate(p, job(1))
    net.run()
    net.release_held()
    net.run()
    (end,) = net.router.ends[bad]
    assert end.error_code == "handoff_failed" and "generation" in end.error_message
    assert_clean(p, d)
    p.ctx.core.close()
    d.ctx.core.close()


@pytest.mark.parametrize("changes", [{"first_page": 40}, {"first_page": 1}, {"pages": [1, 2, 3]}])
def test_a_senseless_ready_fails_its_request(changes: dict[str, object]) -> None:
    p, d = pair()
    net = Net([p, d])
    plain = net.deliver

    def lie(source: str, action: Outgoing) -> None:
        if isinstance(action.message, Ready) and action.message.first_page == 0:
            many = len(changes.get("pages", action.message.pages))
            lists = {"pages": [1] * many, "generations": [0] * many, "digests": [0] * many}
            lie = replace_struct(action.message, **(lists | changes))
            action = replace(action, message=lie, frames=[bytes(8)] * many)
        plain(source, action)

    net.deliver = lie  # type: ignore[method-assign]
    key = net.generate(p, job(), d)
    net.run()
    assert ("error", "handoff_failed") in ends_of(net, key)
    assert_clean(p, d)


@pytest.mark.parametrize("changes", [{"committed": 69}, {"token": 96}, {"draft_hidden": b"123"}])
def test_a_senseless_record_fails_its_request(changes: dict[str, object]) -> None:
    p, d = pair(width=4)
    net = Net([p, d])
    plain = net.deliver

    def lie(source: str, action: Outgoing) -> None:
        if isinstance(action.message, Prebuilt):
            action = replace(action, message=replace_struct(action.message, **changes))
        plain(source, action)

    net.deliver = lie  # type: ignore[method-assign]
    key = net.generate(p, job(), d)
    net.run()
    assert ("error", "handoff_failed") in ends_of(net, key)
    assert_clean(p, d)


@pytest.mark.parametrize("changes", [{"cached_prefix_len": 7}, {"cached_prefix_len": 80}, {"transport": "pigeon"}])
def test_a_senseless_grant_fails_its_request(changes: dict[str, object]) -> None:
    p, d = pair()
    net = Net([p, d])
    plain = net.deliver

    def lie(source: str, action: Outgoing) -> None:
        if isinstance(action.message, Grant):
            action = replace(action, message=replace_struct(action.message, **changes))
        plain(source, action)

    net.deliver = lie  # type: ignore[method-assign]
    key = net.generate(p, job(), d)
    net.run()
    assert ends_of(net, key) == [("error", "handoff_failed")]
    assert_clean(p, d)


# ---- deaths


def handoff_messages() -> int:
    p, d = pair()
    net = Net([p, d])
    for rid in range(3):
        net.generate(p, job(rid), d)
    net.run()
    return sum(isinstance(message, RELAY) for message in [m for _, _, m in net.seen])


NUM_MESSAGES = 25  # of three hand-offs, checked below


def test_the_number_of_messages_to_die_at() -> None:
    assert handoff_messages() == NUM_MESSAGES


@pytest.mark.parametrize("when", range(NUM_MESSAGES))
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_death_at_every_message(when: int, who: str) -> None:
    p, d = pair()
    net = Net([p, d])
    victim, survivor = (p, d) if who == "prefill" else (d, p)
    seen = 0

    def strike(src: str, dst: str, message: object) -> None:
        nonlocal seen
        seen += isinstance(message, RELAY)
        if seen == when + 1 and name_of(victim) not in net.dead:
            net.kill(victim)

    net.on_message = strike
    keys = [net.generate(p, job(rid), d) for rid in range(3)]
    net.run()
    assert net.dead
    for rid, key in enumerate(keys):
        assert expected(job(rid))[: len(net.router.streams[key])] == net.router.streams[key]
        for end in net.router.ends[key]:
            assert (end.reason, end.error_code) in (("length", ""), ("error", "node_lost"))
            if end.reason == "length":
                assert net.router.streams[key] == expected(job(rid))
    if who == "decode":
        assert all(net.router.ends[key] for key in keys if not handed_over(net, key)), "each gets a clear error"
    assert_clean(survivor)


def handed_over(net: Net, key: Key) -> bool:
    return any(message.key == key for message in net.messages(Installed))


def test_requests_that_are_installed_survive_their_prefill_node() -> None:
    p, d = pair()
    net = Net([p, d])
    key = net.generate(p, job(), d)
    net.run(until=lambda: bool(net.messages(Installed)))
    net.kill(p)
    net.run()
    assert net.router.streams[key] == expected(job())
    assert_clean(d)


def test_a_peer_that_came_back_is_dialled_again() -> None:
    p, d = pair()
    net = Net([p, d])
    net.inboxes[name_of(p)].append(PeerClosed(name_of(d)))
    key = net.generate(p, job(), d)
    net.run()
    assert net.router.streams[key] == expected(job())
    assert_clean(p, d)


# ---- routers


def test_a_new_life_of_the_router_ends_the_requests_of_the_old_one() -> None:
    p, d = pair()
    net = Net([p, d])
    net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Installed)))
    net.generate(p, job(1), d)
    for node in (p, d):
        net.to_node(name_of(node), Welcome(ROUTER_ID, 2))
    net.run()
    assert not net.router.ends
    late = net.generate(p, job(2), d)  # of epoch 1
    net.run()
    assert not net.router.streams[late] and counters(p)["wire_errors"] == 1
    assert_clean(p, d)


def test_an_offer_of_an_old_life_of_the_router_is_refused() -> None:
    p, d = pair()
    net = Net([p, d])
    net.tick(name_of(d))
    net.to_node(name_of(d), Welcome(ROUTER_ID, 2))
    net.generate(p, job(), d)
    net.run()
    assert not net.messages(Grant) and "restarted" in net.messages(Refuse)[0].reason
    assert_clean(p, d)


def test_a_closed_link_to_the_router_frees_everything() -> None:
    p, d = pair()
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, Prebuilt)
    net.generate(p, job(), d, num_sequences=2)
    net.generate(d, job(3))
    net.run(until=lambda: bool(net.kept))
    for node in (p, d):
        net.inboxes[name_of(node)].append(PeerClosed(ROUTER))
    net.run()
    assert_clean(p, d)


def test_what_is_queued_for_a_closed_router_is_not_sent_to_the_next() -> None:
    p, _ = pair()
    assert p.tick([PeerClosed(ROUTER)], 0.0) == [], "not up yet: the link keeps trying"
    p.tick([PeerUp(ROUTER), Received(ROUTER, Welcome(ROUTER_ID, 1))], 0.0)
    assert p.tick([PeerClosed(ROUTER)], 0.0) == [HangUp(ROUTER), Dial(ROUTER, ROUTER)]


def test_an_offer_waits_for_its_router_to_say_welcome_here() -> None:
    p, d = pair()
    net = Net([p, d])
    welcome = net.inboxes[name_of(d)].pop()
    key = net.generate(p, job(), d)
    net.run()
    assert not net.messages(Grant)
    net.inboxes[name_of(d)].append(welcome)
    net.run()
    assert net.router.streams[key] == expected(job())
    assert_clean(p, d)


def test_hello_goes_out_with_every_connection() -> None:
    p, d = pair()
    net = Net([p, d])
    net.run()
    net.inboxes[name_of(p)].extend([PeerClosed(ROUTER), PeerUp(ROUTER), Received(ROUTER, Welcome(ROUTER_ID, 1))])
    net.run()
    assert [hello.node_id for hello in net.router.hellos] == ["p0", "d0", "p0"]


# ---- time


def test_a_deadline_ends_a_request_on_both_nodes() -> None:
    for at in RELAY[:4]:
        p, d = pair()
        net = Net([p, d])
        net.hold = lambda src, dst, message, at=at: isinstance(message, at)
        key = net.generate(p, job(), d, remaining_ms=5_000)
        net.run()
        net.at(6.0)
        net.run()
        assert ("error", "deadline_exceeded") in ends_of(net, key)
        net.release_held()
        net.run()
        assert_clean(p, d)


@pytest.mark.parametrize("lost", RELAY)
def test_a_hand_off_that_stalls_is_given_up(lost: type) -> None:
    """One message is lost for good; the lease ends what it would have gone on with."""
    p, d = pair()
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


def test_a_long_queue_at_the_prefill_node_is_no_stall() -> None:
    p, d = pair()
    net = Net([p, d])
    slow = p.ctx.core.loop.step
    p.ctx.core.loop.step = lambda block=False: False  # type: ignore[method-assign]
    key = net.generate(p, job(), d)
    for _ in range(20):
        net.at(LEASE_S / 5)
        net.run()
    p.ctx.core.loop.step = slow  # type: ignore[method-assign]
    net.run()
    assert net.router.streams[key] == expected(job())
    assert not net.router.end(key).error_code
    assert_clean(p, d)


def test_nonsense_is_dropped_and_counted() -> None:
    p, d = pair()
    net = Net([p, d])
    net.run()
    stray = Key(ROUTER_ID, 1, "r99", 0, 0)
    for message in (Grant(stray, 0, 1, "zmq"), Installed(stray, 1), Failed(stray, 1, "?"), Offer):
        if not isinstance(message, type):
            net.to_node(name_of(p), message, name_of(d))
    net.to_node(name_of(p), Wait(stray, "?"), name_of(d))
    net.to_node(name_of(d), Grant(stray, 0, 1, "zmq"), name_of(p))
    net.to_node(name_of(d), Prebuilt(stray, 5, 1, [], 3, 0, b""), name_of(p))
    net.run()
    assert counters(p)["wire_errors"] == 3 and counters(d)["wire_errors"] == 2
    assert [message.key for message in net.messages(Abort)] == [stray], "an unknown grant is given back"
    assert_clean(p, d)
