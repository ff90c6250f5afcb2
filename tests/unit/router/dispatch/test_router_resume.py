"""A broken request goes on elsewhere: what the next attempt asks for, what it costs, where it goes, when it ends."""

from __future__ import annotations

import pytest

from router.fleet.registry import RegisteredNode
from router.policy.placement import NODES_AWAY_S
from router.requests.effects import Effects, Failure, Update
from router.requests.new_request import NewRequest
from router.requests.tickets import Tickets
from shared.core.errors import NoNodes
from shared.core.sampling_params import SamplingParams
from shared.wire.codec import key_of
from shared.wire.messages import Drain, Generate, Key
from shared.wire.tickets import is_genuine
from tests.support.worlds.router_rig import RouterRig, aborts, failures, generates, ids_of, sibling


@pytest.fixture
def rig() -> RouterRig:
    return RouterRig(max_attempts=3)


def lose(rig: RouterRig, node: RegisteredNode) -> Effects:
    rig.registry.remove(node)
    return rig.dispatcher.node_lost(node, "gone", rig.now)


def begun(rig: RouterRig, n: int = 1, max_tokens: int = 5) -> tuple[RegisteredNode, RegisteredNode, Key]:
    """A pair whose decode node has begun every sequence with the token 10 * index + 1."""
    prefill, decode = rig.join("prefill", "p"), rig.join("decode", "d")
    key = rig.open(n=n, max_tokens=max_tokens)[0].key
    for index in range(n):
        rig.run(decode, sibling(key, index), 0, [10 * index + 1])
    return prefill, decode, key


def only(effects: Effects) -> Generate:
    (generate,) = generates(effects)
    return generate


def test_sequences_that_ended_are_not_run_again(rig: RouterRig) -> None:
    _, decode, key = begun(rig, n=3)
    rig.end(decode, key, 1)
    rig.dispatcher.close_sequence(key.rid, 1, rig.now)  # a stop string
    rig.join("decode", "e")
    again = only(lose(rig, decode))
    assert (again.ended, again.output_ids, again.num_sequences) == ([0, 1], [[], [], [21]], 3)
    assert again.seed == 7 and again.key.attempt == 1


@pytest.mark.rule("H20")
def test_tokens_of_the_attempt_before_are_nobodys(rig: RouterRig) -> None:
    _, decode, key = begun(rig)
    spare = rig.join("decode", "e")
    effects = rig.dispatcher.node_lost(decode, "silent", rig.now)  # it lives, and goes on
    decode.is_silent = True
    assert ("d@1", 0, True) in aborts(effects)
    assert not rig.run(decode, key, 1, [2]).news and not rig.end(decode, key, 2).news
    again = rig.journal.find(key.rid)
    assert again is not None and again.sequences[0].ids == [1]
    assert ids_of(rig.run(spare, newer(key), 1, [2])) == [2]


def newer(key: Key) -> Key:
    return Key(key.router_id, key.router_epoch, key.rid, key.attempt + 1, key.seq_index)


def test_what_the_attempt_before_sent_ahead_is_not_trusted(rig: RouterRig) -> None:
    """Neither tokens behind a gap nor an end that came before the last tokens."""
    _, decode, key = begun(rig)
    rig.run(decode, key, 2, [99])
    rig.end(decode, key, 3)
    spare = rig.join("decode", "e")
    again = only(lose(rig, decode))
    assert again.output_ids == [[1]]
    assert ids_of(rig.run(spare, again.key, 1, [2])) == [2]
    effects = rig.run(spare, again.key, 2, [3])
    assert ids_of(effects) == [3] and [news.end for news in effects.news if isinstance(news, Update)] == [None]


@pytest.mark.parametrize(("last", "reason"), [(5, "length"), (2, "stop")])
def test_a_lost_end_is_made_up_for(rig: RouterRig, last: int, reason: str) -> None:
    """All tokens are here and only the word that they are all is missing."""
    decode = rig.join("decode", "d")
    rig.join("decode", "e")
    sampling = SamplingParams(max_tokens=3, stop_token_ids=(2,))
    key = generates(rig.dispatcher.open([NewRequest([1], 1, sampling, 7)], rig.now)[1])[0].key
    runner = decode if decode.ours.open_sequences else rig.registry.find("e", 1)
    assert runner is not None
    rig.run(runner, key, 0, [8, 9, last])
    effects = lose(rig, runner)
    (update,) = effects.news
    assert isinstance(update, Update) and update.end is not None
    assert (update.end.reason, update.end.num_output_tokens) == (reason, 3)
    assert not generates(effects)
    rig.check_quiet()


def test_a_request_that_kills_nodes_is_cut_off(rig: RouterRig) -> None:
    nodes = [rig.join("decode", name) for name in "abcd"]
    rig.open()
    for left in (2, 1, 0):
        victim = next(node for node in nodes if node.ours.open_sequences)
        effects = lose(rig, victim)
        assert len(generates(effects)) == (left > 0)
    (failure,) = effects.news
    assert isinstance(failure, Failure) and "gone; given up after 3 attempts" in failure.error.message
    assert failures(effects) == ["node_lost"]
    assert len(rig.registry) == 1
    rig.check_quiet()


def test_a_full_decode_node_is_avoided_and_nobody_is_blamed(rig: RouterRig) -> None:
    """Its prefill node says so. The client is told to come again, and not that something failed."""
    prefill = rig.join("prefill", "p")
    for name in "dec":
        rig.join("decode", name)
    again = rig.open()[0]
    tried = {again.decode_node}
    for _ in range(2):
        again = only(rig.end(prefill, again.key, 0, "error", "partner_overloaded"))
        tried.add(again.decode_node)
    assert tried == {"d", "e", "c"}
    assert failures(rig.end(prefill, again.key, 0, "error", "partner_overloaded")) == ["overloaded"]
    assert all(node.breaker._faults == 0 for node in rig.registry)
    rig.check_quiet()


@pytest.mark.parametrize("code", ["invalid_request_error", "too_large", "deadline_exceeded"])
def test_what_no_other_node_can_do_better_is_not_tried_again(rig: RouterRig, code: str) -> None:
    _, decode, key = begun(rig)
    rig.join("decode", "e")
    effects = rig.end(decode, key, 1, "error", code)
    assert failures(effects) == [code] and not generates(effects)


def test_with_one_pair_the_decode_node_goes_on_alone(rig: RouterRig) -> None:
    prefill, decode, key = begun(rig)
    again = only(rig.end(prefill, key, 0, "error", "handoff_failed"))
    assert again.decode_node == "" and decode.ours.open_sequences == 1 and prefill.ours.open_sequences == 0


def test_without_a_node_it_waits_for_one() -> None:
    rig = RouterRig(max_attempts=3, resume_wait_s=10.0)
    decode = rig.join("decode", "d")
    key = rig.open()[0].key
    rig.run(decode, key, 0, [1])
    assert not lose(rig, decode).news
    rig.now = 9.0
    assert not rig.dispatcher.tick(rig.now).news
    back = rig.join("decode", "d", epoch=2)
    again = only(rig.dispatcher.tick(rig.now))
    assert again.output_ids == [[1]]
    assert not generates(rig.dispatcher.tick(rig.now))
    assert ids_of(rig.run(back, again.key, 1, [2])) == [2]


def test_a_new_request_waits_a_moment_while_all_nodes_dial_anew() -> None:
    """The router's own key has changed; where there was no node before it fails at once."""
    rig = RouterRig()
    with pytest.raises(NoNodes):
        rig.open()
    decode = rig.join("decode", "d")
    rig.dispatcher.tick(0.0)
    assert not lose(rig, decode).news
    rig.now = 1.0
    assert not rig.open(), "parked"
    back = rig.join("decode", "d", epoch=2)
    again = only(rig.dispatcher.tick(rig.now))
    assert ids_of(rig.run(back, again.key, 0, [1])) == [1]
    lose(rig, back)
    rig.now = 1.0 + NODES_AWAY_S
    with pytest.raises(NoNodes):
        rig.open()


def test_leaving_draining_nodes_costs_no_attempt(rig: RouterRig) -> None:
    """A rolling restart may move one request more often than anything may fail."""
    nodes = [rig.join("decode", name) for name in "abcdef"]
    rig.open()
    for _ in range(5):
        node = next(node for node in nodes if node.ours.open_sequences)
        effects = rig.dispatcher.drain(node, Drain(node.node_id, "restart"), 5.0, rig.now)
        assert effects.sends == [(node.peer, Drain(node.node_id, "restart", 5000))]
        assert not generates(rig.dispatcher.tick(rig.now + 4.9))
        rig.now += 5.0
        moved = rig.dispatcher.tick(rig.now)
        assert len(generates(moved)) == 1 and (node.peer, 0, True) in aborts(moved)
    assert rig.journal.all()[0].attempt.number == 5


def test_a_node_that_says_it_drains_gets_nothing_more(rig: RouterRig) -> None:
    _, decode, key = begun(rig)
    rig.join("decode", "e")
    again = only(rig.end(decode, key, 1, "error", "node_draining"))
    assert again.decode_node == "e" and decode.is_draining and decode.breaker._faults == 0
    assert rig.journal.find(key.rid).num_failed == 0  # type: ignore[union-attr]


def test_a_leaving_decode_node_costs_no_attempt_and_no_blame(rig: RouterRig) -> None:
    """Its prefill node says so, before the decode node's own heartbeat does."""
    prefill, decode, key = begun(rig)
    rig.join("decode", "e")
    again = only(rig.end(prefill, key, 0, "error", "partner_draining"))
    assert again.decode_node == "e" and not prefill.is_draining
    assert prefill.breaker._faults == decode.breaker._faults == 0
    assert rig.journal.find(key.rid).num_failed == 0  # type: ignore[union-attr]


def test_a_draining_prefill_node_s_hand_offs_stay_where_they_are(rig: RouterRig) -> None:
    prefill, _, _ = begun(rig)
    rig.dispatcher.drain(prefill, Drain("p", "stop"), 0.0, rig.now)
    effects = rig.dispatcher.tick(rig.now)
    assert not effects.sends and effects.num_resumed == 0


def test_the_nodes_of_an_attempt_are_told_when_it_is_over() -> None:
    """Not when they speak of it again: a prefill node may have it in its queue for long."""
    rig = RouterRig(max_attempts=3)
    prefill, decode, other = rig.join("prefill", "p"), rig.join("decode", "d"), rig.join("decode", "e")
    (generate,) = rig.open()
    target, spare = (decode, other) if generate.decode_node == "d" else (other, decode)
    effects = rig.dispatcher.node_lost(target, "test", rig.now)
    assert (prefill.peer, 0, True) in aborts(effects)
    assert spare.ours.open_sequences == 1


# ---- tickets


def test_a_handed_over_request_has_a_ticket_for_its_two_nodes() -> None:
    rig = RouterRig()
    p, d = rig.join("prefill", "p"), rig.join("decode", "d")
    rig.now = 7.0
    (generate,) = rig.open(prompt=(1, 2, 3), n=2, max_tokens=5)
    tickets, ticket, key = rig.dispatcher.tickets, generate.ticket, key_of(generate.key)
    assert ticket is not None and is_genuine(tickets.key_of(d.peer), key, p.peer, ticket)
    assert is_genuine(tickets.key_of(d.peer), key.sibling(1), p.peer, ticket)
    assert not is_genuine(tickets.key_of(d.peer), key.sibling(2), p.peer, ticket)
    assert not is_genuine(tickets.key_of(p.peer), key, p.peer, ticket), "a prefill node's own key makes none"
    assert (ticket.num_sequences, ticket.most_tokens, ticket.deadline_ms) == (2, 8, 67_000)


def test_each_router_s_life_has_keys_of_its_own() -> None:
    one, other = Tickets(), Tickets()
    assert one.key_of("d@1") == one.key_of("d@1") != other.key_of("d@1")
    assert one.key_of("d@1") != one.key_of("d@2")
