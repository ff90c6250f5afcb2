"""What `--transport auto` does: each transport that both nodes have is tried, the fastest stays, and it says why."""

from __future__ import annotations

import io
from dataclasses import replace

from prefill_node.transport_choice import AGAIN_EVERY, FAILED_S, KEPT, TRIALS, TransportChoice
from shared.core.sampling_params import SamplingParams
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.transfer.transports import make_receiver, make_sender
from shared.wire.messages import Grant, Offer
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import Net, assert_clean, make_node

PEER = "d0@1"
SECONDS = {"shm": 0.009, "zmq": 0.012, "gloo": 0.004}


def choice(*transports: str) -> tuple[TransportChoice, io.StringIO]:
    said = io.StringIO()
    return TransportChoice(transports, LogOnce(Logger("p0", said))), said


def hand_over(one: TransportChoice, seconds: dict[str, float], times: int, can: tuple[str, ...] = ()) -> list[str]:
    """What was granted each time."""
    granted = []
    for _ in range(times):
        offered = one.order(PEER)
        name = next(name for name in offered if name in (can or tuple(seconds)))
        one.granted(PEER, offered, name)
        one.measured(PEER, name, seconds[name])
        granted.append(name)
    return granted


def test_each_is_tried_in_turn_and_the_fastest_stays() -> None:
    one, said = choice("shm", "zmq", "gloo")
    assert one.order(PEER) == ["shm", "zmq", "gloo"]
    granted = hand_over(one, SECONDS, 3 * TRIALS)
    assert granted == ["shm", "zmq", "gloo"] * TRIALS
    assert set(hand_over(one, SECONDS, 10)) == {"gloo"}
    assert one.reasons() == {"d0": "gloo: shm 9.0 ms, zmq 12.0 ms, gloo 4.0 ms from last chunk to installed"}
    assert said.getvalue().count("transport chosen") == 1 and "transport=gloo" in said.getvalue()


def test_the_others_are_tried_again_and_a_faster_one_takes_over() -> None:
    one, said = choice("shm", "zmq")
    hand_over(one, SECONDS, 2 * TRIALS)
    later = hand_over(one, SECONDS, 3 * AGAIN_EVERY)
    assert 0 < later.count("zmq") <= 3, "seldom"
    hand_over(one, {"shm": 0.5, "zmq": 0.012}, KEPT)
    assert set(hand_over(one, {"shm": 0.5, "zmq": 0.012}, 5)) == {"zmq"}
    assert said.getvalue().count("transport chosen") == 2


def test_a_node_s_words_on_its_transports_stand_by_the_reason() -> None:
    """`baton admin status` shows it."""
    one = TransportChoice(("zmq",), LogOnce(Logger("p0", io.StringIO())), "through pinned host memory")
    hand_over(one, {"zmq": 0.01}, 1)
    assert one.reasons() == {"d0": "zmq: the only one that both have (through pinned host memory)"}


def test_nearly_as_fast_is_no_reason_to_change() -> None:
    one, _ = choice("shm", "zmq")
    hand_over(one, {"shm": 0.010, "zmq": 0.011}, 2 * TRIALS)
    hand_over(one, {"shm": 0.010, "zmq": 0.0095}, 4 * AGAIN_EVERY)
    assert one.order(PEER)[0] == "shm"


def test_what_a_peer_can_not_use_is_not_offered_first_again() -> None:
    one, _ = choice("shm", "zmq", "gloo")
    assert set(hand_over(one, SECONDS, 3 * TRIALS, can=("zmq",))) == {"zmq"}
    assert one.order(PEER) == ["zmq"]
    alone, _ = choice("zmq")
    hand_over(alone, SECONDS, 1)
    assert alone.reasons() == {"d0": "zmq: the only one that both have"}


def test_contradictory_grants_leave_a_transport() -> None:
    """The defect: a peer granted transports that it had passed over before, and in the end none was left."""
    one, _ = choice("shm", "zmq", "gloo")
    one.granted(PEER, ["zmq", "shm", "gloo"], "shm")
    one.granted(PEER, ["shm", "zmq", "gloo"], "zmq")
    assert one.order(PEER) == ["shm", "gloo"], "zmq was passed over before"
    one.granted(PEER, ["gloo", "shm"], "shm")
    one.granted(PEER, ["shm", "gloo"], "gloo")
    assert one.order(PEER) == ["shm"] and one.reasons() == {"d0": "shm: the only one that both have"}


def test_one_that_fails_is_the_slowest() -> None:
    one, _ = choice("shm", "zmq")
    for _ in range(2 * TRIALS):
        offered = one.order(PEER)
        one.granted(PEER, offered, offered[0])
        one.failed(PEER, "shm") if offered[0] == "shm" else one.measured(PEER, "zmq", FAILED_S / 2)
    assert one.order(PEER)[0] == "zmq"


def test_a_peer_that_is_gone_is_forgotten() -> None:
    one, _ = choice("shm", "zmq")
    hand_over(one, SECONDS, 2 * TRIALS)
    one.forget_peer(PEER)
    assert not one.reasons() and one.order(PEER) == ["shm", "zmq"]


def test_nodes_try_all_they_have_and_the_prefill_node_reports_it() -> None:
    knobs = CoreKnobs(chunk_size=32, prefix_cache=False)
    p = make_node("prefill", "p0", replace(knobs, shared_memory=True), transport="shm")
    d = make_node("decode", "d0", knobs, transport="shm")
    for node, make in ((p, make_sender), (d, make_receiver)):
        names = ("shm", "zmq", "gloo")
        node.ctx.facts = replace(node.ctx.facts, transports=names)
        node.side = type(node.side)(node.ctx, {name: make(name, node.ctx.core.pool) for name in names})
    net = Net([p, d])
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    for rid in range(3 * TRIALS + 1):
        net.generate(p, Job(rid, tuple(range(1, 60)), sampling, rid), d)
        net.run()
    granted = [message.transport for message in net.messages(Grant) if isinstance(message, Grant)]
    assert granted[: 3 * TRIALS] == ["shm", "zmq", "gloo"] * TRIALS
    net.at(10.0)
    net.run()
    assert net.router.heartbeats["p0"].load.hands_over["d0"].startswith(f"{granted[-1]}: shm")
    assert_clean(p, d)
    for node in (p, d):
        node.side.close()
        node.ctx.core.close()


def test_what_a_peer_can_t_use_is_offered_last_from_then_on() -> None:
    knobs = CoreKnobs(chunk_size=32, prefix_cache=False)
    p, d = (
        make_node("prefill", "p0", replace(knobs, shared_memory=True), transport="shm"),
        make_node("decode", "d0", knobs),
    )
    for node, make, names in ((p, make_sender, ("shm", "zmq")), (d, make_receiver, ("zmq",))):
        node.ctx.facts = replace(node.ctx.facts, transports=names)
        node.side = type(node.side)(node.ctx, {name: make(name, node.ctx.core.pool) for name in names})
    net = Net([p, d])
    for rid in range(2):
        net.generate(p, Job(rid, tuple(range(1, 60)), SamplingParams(max_tokens=2, temperature=0.0), rid), d)
        net.run()
    assert [message.transports[0] for message in net.messages(Offer) if isinstance(message, Offer)] == ["shm", "zmq"]
    assert_clean(p, d)
    for node in (p, d):
        node.side.close()
        node.ctx.core.close()
