"""A request under which nodes die is cut off after two; who only waited there, or ran beside it, pays nothing."""

from __future__ import annotations

import pytest

from router.fleet.registry import RegisteredNode
from router.requests.effects import Effects
from router.requests.journal import OpenRequest
from router.requests.suspects import CLEARED_AFTER
from shared.config.settings.silence import link_silence
from shared.wire.messages import Begun, Drain, Generate, Key
from tests.support.worlds.router_rig import RouterRig, failures, generates


@pytest.fixture
def rig() -> RouterRig:
    return RouterRig(max_attempts=3, resume_wait_s=5.0)


def die(rig: RouterRig, node: RegisteredNode) -> Effects:
    rig.registry.remove(node)
    return rig.dispatcher.node_lost(node, "its connection closed", rig.now, has_died=True)


def begin(rig: RouterRig, node: RegisteredNode, *keys: Key) -> None:
    rig.dispatcher.begun(Begun(node.node_id, node.hello.epoch, list(keys)), rig.now)


def found(rig: RouterRig, key: Key) -> OpenRequest:
    request = rig.journal.find(key.rid)
    assert request is not None
    return request


def node_of(rig: RouterRig, key: Key) -> RegisteredNode:
    (node,) = found(rig, key).attempt.nodes
    return node


def one(rig: RouterRig) -> Generate:
    return rig.open(max_tokens=90)[0]


def again(effects: Effects, key: Key) -> Key:
    (newer,) = [generate.key for generate in generates(effects) if generate.key.rid == key.rid]
    return newer


def killer(rig: RouterRig, *, with_tokens: bool) -> tuple[Effects, Key]:
    """Two nodes die under it, each as soon as it has begun; what the second death brings."""
    key = one(rig).key
    for turn in range(2):
        node = node_of(rig, key)
        begin(rig, node, key)
        if with_tokens:
            rig.run(node, key, turn, [turn])
        effects = die(rig, node)
        if not turn:
            key = again(effects, key)
    return effects, key


@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_request_that_kills_two_nodes_ends(rig: RouterRig, with_tokens: bool) -> None:
    for name in "abcd":
        rig.join("decode", name)
    effects, key = killer(rig, with_tokens=with_tokens)
    assert failures(effects) == ["request_kills_nodes"] and not generates(effects)
    (failure,) = effects.news
    assert failure.error.subject == key.rid and failure.error.status == 422  # type: ignore[union-attr]
    assert [alarm.kind for alarm in effects.alarms] == ["two nodes have died while they ran the same request"]
    assert len(rig.registry) == 2
    rig.check_quiet()


def test_who_only_waited_on_two_dead_nodes_is_no_suspect(rig: RouterRig) -> None:
    for name in "abcde":
        rig.join("decode", name)
    key = one(rig).key
    for _ in range(2):
        effects = die(rig, node_of(rig, key))
        assert not failures(effects)
        key = again(effects, key)
    assert found(rig, key).suspicion is None
    assert failures(die(rig, node_of(rig, key))) == ["node_lost"], "attempts are bounded all the same"


def test_who_runs_beside_a_suspect_pays_nothing(rig: RouterRig) -> None:
    a = rig.join("decode", "a")
    bad = one(rig).key
    begin(rig, a, bad)
    b = rig.join("decode", "b")
    bad = again(die(rig, a), bad)
    beside, queued = one(rig).key, one(rig).key  # nothing else is left
    for key in (bad, beside):
        begin(rig, b, key)
        rig.run(b, key, 0, [1])
    rig.join("decode", "c")
    effects = die(rig, b)
    assert failures(effects) == ["request_kills_nodes"]
    for key in (beside, queued):
        request = found(rig, key)
        assert request.num_failed == 0 and request.suspicion is None and request.attempt.nodes


def test_a_suspect_gets_a_node_for_itself(rig: RouterRig) -> None:
    a = rig.join("decode", "a")
    bad = one(rig).key
    begin(rig, a, bad)
    rig.join("prefill", "p")
    for name in "bc":
        rig.join("decode", name)
    busy = one(rig).key
    bad = again(die(rig, a), bad)
    alone = node_of(rig, bad)
    assert alone not in found(rig, busy).attempt.nodes and alone.ours.open_sequences == 1
    for _ in range(6):
        assert alone not in found(rig, one(rig).key).attempt.nodes


def test_where_none_is_idle_it_goes_where_fewest_would_suffer(rig: RouterRig) -> None:
    a = rig.join("decode", "a")
    bad = one(rig).key
    begin(rig, a, bad)
    b, c = rig.join("decode", "b"), rig.join("decode", "c")
    for _ in range(3):
        one(rig)
    b.ours.open_sequences, c.ours.open_sequences = 2, 1
    bad = again(die(rig, a), bad)
    assert node_of(rig, bad) is c
    assert {found(rig, one(rig).key).attempt.decode for _ in range(4)} == {b, c}, "it has not that node for itself"


def test_who_gets_further_than_before_is_cleared(rig: RouterRig) -> None:
    a = rig.join("decode", "a")
    key = one(rig).key
    begin(rig, a, key)
    rig.run(a, key, 0, [1, 2])
    b = rig.join("decode", "b")
    key = again(die(rig, a), key)
    begin(rig, b, key)
    rig.run(b, key, 2, range(CLEARED_AFTER + 1))
    c = rig.join("decode", "c")
    assert {found(rig, one(rig).key).attempt.decode for _ in range(4)} == {b, c}
    effects = die(rig, b)
    assert not failures(effects) and found(rig, again(effects, key)).num_failed == 2


def test_two_suspects_on_one_node_end_neither(rig: RouterRig) -> None:
    """It can't be told which of them did it, and somebody who did not must not end for it."""
    a = rig.join("decode", "a")
    keys = [one(rig).key, one(rig).key]
    begin(rig, a, *keys)
    b = rig.join("decode", "b")
    effects = die(rig, a)
    keys = [again(effects, key) for key in keys]
    begin(rig, b, *keys)
    rig.join("decode", "c")
    effects = die(rig, b)
    assert not failures(effects) and [found(rig, key).num_failed for key in keys] == [2, 2]


def test_a_node_that_comes_back_as_the_same_life_had_not_died(rig: RouterRig) -> None:
    a = rig.join("decode", "a")
    key = one(rig).key
    begin(rig, a, key)
    b = rig.join("decode", "b")
    key = again(die(rig, a), key)
    rig.join("decode", "a")  # only its connection had broken
    begin(rig, b, key)
    effects = die(rig, b)
    assert not failures(effects) and again(effects, key)


@pytest.mark.parametrize("how", ["silent", "missed", "quiet before"])
def test_what_was_cut_off_or_missed_is_no_death(rig: RouterRig, how: str) -> None:
    for name in "abcd":
        rig.join("decode", name)
    if how == "missed":
        rig.dispatcher.was_away(excused_until=1.0)
    key = one(rig).key
    for _ in range(2):
        node = node_of(rig, key)
        begin(rig, node, key)
        rig.registry.remove(node)
        rig.now += link_silence(rig.registry.silence_s).shortest_s if how == "quiet before" else 0.0
        effects = rig.dispatcher.node_lost(node, "gone", rig.now, has_died=how != "silent")
        key = again(effects, key)
    assert found(rig, key).suspicion is None


def test_a_node_that_was_told_to_leave_had_not_died(rig: RouterRig) -> None:
    """It ended when it was idle, and its last words were lost: after two such nodes the request got a 422."""
    for name in "abcd":
        rig.join("decode", name)
    key = one(rig).key
    for _ in range(2):
        node = node_of(rig, key)
        begin(rig, node, key)
        rig.dispatcher.drain(node, Drain(node.node_id, "restart"), 5.0, rig.now)
        effects = die(rig, node)
        assert not failures(effects) and not effects.alarms
        key = again(effects, key)
    assert found(rig, key).suspicion is None


def test_a_prefill_node_s_death_after_its_part_blames_no_request(rig: RouterRig) -> None:
    p = rig.join("prefill", "p")
    rig.join("decode", "d")
    key = one(rig).key
    begin(rig, p, key)
    rig.run(p, key, 0, [1])
    rig.join("prefill", "q")
    key = again(die(rig, p), key)
    request = found(rig, key)
    assert request.suspicion is None


def test_a_prefill_node_that_dies_in_its_part_may_have_been(rig: RouterRig) -> None:
    """Also where its decode node saw the connection close before this router did."""
    for seen_by_partner in (False, True):
        p, d = rig.join("prefill", "p"), rig.join("decode", "d")
        key = one(rig).key
        begin(rig, p, key)
        if seen_by_partner:
            rig.end(d, key, 0, "error", "peer_unreachable")
        die(rig, p)
        rig.dispatcher.tick(rig.now)
        request = found(rig, key)
        assert request.suspicion is not None and request.attempt.is_alone and len(request.attempt.nodes) == 1
        rig.dispatcher.cancel([key.rid], rig.now)


def test_nothing_is_kept_of_suspects_that_are_over(rig: RouterRig) -> None:
    for number in range(5):
        rig.join("decode", f"n{number}")
        rig.join("decode", "spare")
        key = one(rig).key
        begin(rig, node_of(rig, key), key)
        die(rig, node_of(rig, key))
        assert found(rig, key).suspicion is not None
        rig.dispatcher.cancel([key.rid], rig.now)
    assert not rig.dispatcher._attempts._suspects._open
