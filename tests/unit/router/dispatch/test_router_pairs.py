"""Pairs of nodes that can't reach each other: who is blamed, who is next, when the pair is tried again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.api.admin.admin import pair_status
from router.fleet.registry import RegisteredNode
from router.policy.interface import Picked, Wanted
from router.requests.effects import Effects
from router.requests.pairs import ALARM, BrokenPair
from shared.wire.messages import Generate, Key
from tests.support.worlds.router_rig import RouterRig, failures, generates, ids_of

OPEN_S = 2.0  # after the first failure


@pytest.fixture
def rig() -> RouterRig:
    return RouterRig(max_attempts=1, resume_wait_s=5.0)


def cut(rig: RouterRig, speaker: RegisteredNode, key: Key) -> Effects:
    """One of the two says that it can't reach the other; what follows comes with the next tick."""
    effects = rig.end(speaker, key, 0, "error", "peer_unreachable")
    assert not generates(effects) and not effects.news
    rig.now += 0.25
    return rig.dispatcher.tick(rig.now)


def only(effects: Effects) -> Generate:
    (generate,) = generates(effects)
    return generate


def open_one(rig: RouterRig) -> Generate:
    return rig.open()[0]


def peers(rig: RouterRig) -> list[tuple[str, str]]:
    return [(pair.prefill.peer, pair.decode.peer) for pair in rig.dispatcher.broken_pairs()]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_neither_node_is_blamed_and_no_attempt_is_spent(rig: RouterRig, role: str) -> None:
    nodes = {"prefill": rig.join("prefill", "p"), "decode": rig.join("decode", "d")}
    key = open_one(rig).key
    again = only(cut(rig, nodes[role], key))
    assert again.key.rid == key.rid and again.decode_node == "", "one node alone"
    assert all(node.breaker._faults == 0 and node.can_take(rig.now) for node in nodes.values())
    request = rig.journal.find(key.rid)
    assert request is not None and request.num_failed == 0 and not request.avoid
    assert peers(rig) == [("p@1", "d@1")]


def test_another_decode_node_is_found_for_that_prefill_node(rig: RouterRig) -> None:
    p, _ = rig.join("prefill", "p"), rig.join("decode", "d")
    key = open_one(rig).key
    rig.join("decode", "e")
    assert only(cut(rig, p, key)).decode_node == "e"
    assert {open_one(rig).decode_node for _ in range(5)} == {"e"}


def test_however_many_pairs_are_broken_few_picks_are_made(rig: RouterRig) -> None:
    """A pick looks at all its nodes, so a pick per broken node would cost their square."""
    p, nodes = rig.join("prefill", "p"), [rig.join("decode", f"d{number}") for number in range(20)]
    placer = rig.dispatcher._placer
    for node in nodes[1:]:
        broken = placer.pairs._broken[p.peer, node.peer] = BrokenPair(p, node, rig.now)
        broken.breaker.failed(rig.now)
        nodes[0].ours.open_sequences += 1  # the only whole pair has the highest load
    picks = 0
    pick = placer._policy.pick

    def counted(among: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        nonlocal picks
        picks += 1
        return pick(among, wanted)

    placer._policy.pick = counted  # type: ignore[method-assign]
    assert open_one(rig).decode_node == "d0"
    assert picks <= 3


def test_a_pair_is_tried_again_by_one_request_at_a_time(rig: RouterRig) -> None:
    p, d = rig.join("prefill", "p"), rig.join("decode", "d")
    cut(rig, p, open_one(rig).key)
    assert open_one(rig).decode_node == ""
    rig.now += OPEN_S
    probe = open_one(rig)
    assert probe.decode_node == "d"
    assert open_one(rig).decode_node == "", "one at a time"
    rig.run(p, probe.key, 0, [1])
    assert open_one(rig).decode_node == "", "what its prefill node says shows nothing of the pair"
    rig.run(d, probe.key, 0, [1])
    rig.dispatcher.tick(rig.now)
    assert not peers(rig) and open_one(rig).decode_node == "d"


def test_each_probe_that_fails_doubles_the_wait(rig: RouterRig) -> None:
    p = rig.join("prefill", "p")
    rig.join("decode", "d")
    cut(rig, p, open_one(rig).key)
    for wait in (2, 4, 8, 16, 32, 60, 60):
        rig.now += wait - 0.5
        assert open_one(rig).decode_node == ""
        rig.now += 0.25
        cut(rig, p, open_one(rig).key)


def test_a_batch_that_fails_together_is_one_failure(rig: RouterRig) -> None:
    p = rig.join("prefill", "p")
    rig.join("decode", "d")
    for generate in rig.open(rounds=20):
        rig.end(p, generate.key, 0, "error", "peer_unreachable")
    assert [pair.num_faults for pair in rig.dispatcher.broken_pairs()] == [1]
    rig.now += OPEN_S
    assert open_one(rig).decode_node == "d", "not open for longer"


def test_a_probe_whose_client_hangs_up_lets_another_one_go(rig: RouterRig) -> None:
    p = rig.join("prefill", "p")
    rig.join("decode", "d")
    cut(rig, p, open_one(rig).key)
    rig.now += OPEN_S
    rig.dispatcher.cancel([open_one(rig).key.rid], rig.now)
    assert open_one(rig).decode_node == "d"


def test_a_request_from_before_heals_nothing(rig: RouterRig) -> None:
    """It was handed over before the way broke."""
    p, d = rig.join("prefill", "p"), rig.join("decode", "d")
    old, new = rig.open(rounds=2)
    rig.run(d, old.key, 0, [1])
    cut(rig, p, new.key)
    assert ids_of(rig.run(d, old.key, 1, [2])) == [2]
    rig.dispatcher.tick(rig.now)
    rig.end(d, old.key, 2)
    assert peers(rig) == [("p@1", "d@1")]


@pytest.mark.parametrize("node_id", ["p", "d"])
def test_a_restarted_node_begins_anew_without_its_old_record(rig: RouterRig, node_id: str) -> None:
    nodes = {"p": rig.join("prefill", "p"), "d": rig.join("decode", "d")}
    cut(rig, nodes["p"], open_one(rig).key)
    rig.join(nodes[node_id].role, node_id, epoch=2)
    rig.dispatcher.node_lost(nodes[node_id], "restarted", rig.now)
    assert not peers(rig) and open_one(rig).decode_node == "d"


def test_a_request_is_not_passed_around_for_ever() -> None:
    rig = RouterRig(max_attempts=2, resume_wait_s=5.0)
    speakers = {name: rig.join("prefill", name) for name in "pqrstuvw"}
    rig.join("decode", "d")
    generate = open_one(rig)
    for _ in range(5):
        generate = only(cut(rig, speakers[prefill_of(rig, generate)], generate.key))
    assert len(peers(rig)) == 5
    last = rig.end(speakers[prefill_of(rig, generate)], generate.key, 0, "error", "peer_unreachable")
    assert failures(last) == ["node_lost"], "four were free, two were attempts"
    rig.check_quiet()


def prefill_of(rig: RouterRig, generate: Generate) -> str:
    request = rig.journal.find(generate.key.rid)
    assert request is not None and request.attempt.prefill is not None
    return request.attempt.prefill.node_id


# ---- what is told of it


def test_the_status_shows_it(rig: RouterRig) -> None:
    p = rig.join("prefill", "p")
    rig.join("decode", "d")
    cut(rig, p, open_one(rig).key)
    (pair,) = rig.dispatcher.broken_pairs()
    shown = {"prefill": "p", "decode": "d", "endpoint": "tcp://d", "since_s": 3.0, "tries": 1}
    assert pair_status(pair, 3.0) == shown


def test_it_is_told_a_tick_later_and_once_for_each_failure(rig: RouterRig) -> None:
    p = rig.join("prefill", "p")
    rig.join("decode", "d")
    effects = rig.end(p, open_one(rig).key, 0, "error", "peer_unreachable")
    assert not effects.alarms
    told = rig.dispatcher.tick(rig.now).alarms
    assert [(alarm.kind, alarm.subject) for alarm in told] == [(ALARM, "p -> d")]
    assert not rig.dispatcher.tick(rig.now).alarms


def test_a_node_that_has_died_is_no_broken_pair(rig: RouterRig) -> None:
    """Its partner saw the connection close a moment before this router did."""
    p, d = rig.join("prefill", "p"), rig.join("decode", "d")
    rig.end(p, open_one(rig).key, 0, "error", "peer_unreachable")
    rig.registry.remove(d)
    rig.dispatcher.node_lost(d, "closed", rig.now, has_died=True)
    assert not rig.dispatcher.tick(rig.now).alarms and not peers(rig)
