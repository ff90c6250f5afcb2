"""Nodes that come, go, fall silent and fail; which one is picked; when one is left alone."""

from __future__ import annotations

import msgspec
import pytest

from router.fleet.breaker import Breaker
from router.fleet.leaving import By, Leaving, leaving_after
from router.fleet.registry import Registry
from router.policy.interface import Policy, Wanted
from router.policy.least_load import LeastLoad
from router.policy.placement import Placer
from router.policy.round_robin import RoundRobin
from shared.wire.fitting import REPORTED_ONLY, misfit
from shared.wire.messages import Fingerprint, Heartbeat
from tests.support.worlds.router_rig import FINGERPRINT, RouterRig, hello, load


@pytest.mark.parametrize("name", [name for name in Fingerprint.__struct_fields__ if name not in REPORTED_ONLY])
def test_each_field_of_the_fingerprint_keeps_nodes_apart(name: str) -> None:
    value = getattr(FINGERPRINT, name)
    changed = value + 2 if isinstance(value, int) else value + "x"  # 2: neighbouring protocols fit
    other = msgspec.structs.replace(FINGERPRINT, **{name: changed})
    assert misfit(FINGERPRINT, other) == name or name == "spec"
    assert misfit(other, FINGERPRINT) == name


def test_only_the_newest_epoch_counts() -> None:
    registry = Registry(5.0)
    first, _ = registry.hello("d@2", hello("decode", "d", 2), 0.0)
    assert registry.hello("d@1", hello("decode", "d", 1), 0.0) == (None, None)
    second, replaced = registry.hello("d@3", hello("decode", "d", 3), 0.0)
    assert replaced is first and registry.find("d", 3) is second and registry.find("d", 2) is None
    beat = Heartbeat("d", 2, load(), False)
    assert registry.heartbeat(beat, 1.0) is None
    assert registry.hello("x@1", hello("cook", "x"), 0.0) == (None, None)


def test_a_silent_life_keeps_out_no_life_with_an_earlier_clock() -> None:
    """Power loss behind a half-open connection: nobody ever tells the router that it is closed (simulation seed
    504748)."""
    registry = Registry(5.0)
    first, _ = registry.hello("d@2", hello("decode", "d", 2), 0.0)
    assert registry.hello("d@1", hello("decode", "d", 1), 4.0) == (None, None)
    assert registry.newly_silent(6.0) == [first]
    second, replaced = registry.hello("d@1", hello("decode", "d", 1), 7.0)
    assert second is not None and replaced is first and registry.find("d", 1) is second


def test_silence_is_told_once_and_speech_ends_it() -> None:
    rig = RouterRig()
    node = rig.join("decode", "d")
    assert rig.registry.newly_silent(5.0) == []
    assert rig.registry.newly_silent(5.1) == [node] and rig.registry.newly_silent(6.0) == []
    assert not rig.registry.usable(6.0) and rig.registry.max_context() is None
    rig.registry.heartbeat(Heartbeat("d", 1, load(), False), 7.0)
    assert rig.registry.usable(7.0) == [node] and rig.registry.newly_silent(8.0) == []


def test_a_drain_lasts_and_a_list_may_change() -> None:
    """Heartbeats of one node, in order: (draining, leaves) and who makes it leave then."""
    story = [
        ((False, False), None),
        ((False, True), By.LIST),
        ((True, True), By.LIST | By.NODE),
        ((False, False), By.NODE),
    ]
    leaving = None
    for (draining, leaves), by in story:
        leaving = leaving_after(leaving, Heartbeat("d", 1, load(), draining, leaves=leaves), 0.0)
        assert (None if leaving is None else leaving.by) == by
    assert leaving_after(Leaving(By.LIST), Heartbeat("d", 1, load(), False), 0.0) is None


def test_the_largest_node_sets_the_context_and_gets_long_prompts() -> None:
    registry = Registry(5.0)
    assert registry.max_context() is None and registry.common_context() is None
    registry.hello("a@1", hello("decode", "a", context=200), 0.0)
    registry.hello("b@1", hello("prefill", "b", context=100), 0.0)
    assert registry.max_context() == 200 and registry.common_context() == 100
    registry.hello("c@1", hello("prefill", "c", context=200), 0.0)
    placer = Placer(registry, LeastLoad(), 0)
    for _ in range(3):
        placement = placer.place(Wanted(50), (), 101)
        assert placement.prefill is not None and placement.decode is not None
        assert (placement.prefill.node_id, placement.decode.node_id) == ("c", "a")
        placement.prefill.ours.dispatched += 1
    assert placer.place(Wanted(50), (), 100).prefill is registry.named("b")
    assert placer.place(Wanted(50), (), 300).decode is registry.named("a"), "nobody can: the node says so to the client"


def test_round_robin_takes_turns_per_role() -> None:
    rig = RouterRig()
    nodes = [rig.join("decode", name) for name in "abc"]
    prefills = [rig.join("prefill", name) for name in "xy"]
    policy = RoundRobin()
    assert [policy.pick(nodes, Wanted()).node.node_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert [policy.pick(prefills, Wanted()).node.node_id for _ in range(3)] == ["x", "y", "x"]
    assert policy.pick([nodes[0], nodes[2]], Wanted()).node.node_id == "c"  # b is gone; the turn goes on behind a


def test_least_load_looks_at_reports_and_own_requests() -> None:
    rig = RouterRig()
    first, second = rig.join("decode", "a"), rig.join("decode", "b")
    policy = LeastLoad()
    first.reported(load(free=4, running=4))
    assert policy.pick([first, second], Wanted()).node is second
    second.ours.open_sequences = 5  # sent, but not in a report yet
    assert policy.pick([first, second], Wanted()).node is first
    x, y = rig.join("prefill", "x"), rig.join("prefill", "y")
    x.ours.open_prompt_tokens = x.ours.open_prompt_work = 100
    assert policy.pick([x, y], Wanted()).node is y
    y.reported(msgspec.structs.replace(load(), waiting_tokens=200))
    assert policy.pick([x, y], Wanted()).node is x


@pytest.mark.parametrize("policy", [LeastLoad(), RoundRobin()])
def test_equal_nodes_share_the_work(policy: Policy) -> None:
    rig = RouterRig()
    nodes = [rig.join("decode", name) for name in "abc"]
    for _ in range(9):
        policy.pick(nodes, Wanted()).node.ours.dispatched += 1
    assert [node.ours.dispatched for node in nodes] == [3, 3, 3]


def test_a_breaker_opens_after_faults_in_a_row() -> None:
    breaker = Breaker(max_faults=3, open_s=2.0)
    for _ in range(2):
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(1.9)


def test_half_open_lets_one_probe_through() -> None:
    breaker = Breaker(max_faults=1, open_s=2.0)
    breaker.failed(0.0)
    assert breaker.allows(2.0)
    breaker.sent()
    assert not breaker.allows(2.0)
    breaker.abandoned()
    assert breaker.allows(2.0)
    breaker.sent()
    breaker.failed(3.0)
    assert not breaker.allows(6.9) and breaker.allows(7.0)  # twice as long
    breaker.sent()
    breaker.succeeded()
    assert breaker.allows(7.0) and breaker.allows(7.0)


def test_a_failing_node_is_left_alone_unless_it_is_the_last() -> None:
    rig = RouterRig()
    bad, good = rig.join("decode", "bad"), rig.join("decode", "good")
    for _ in range(3):
        bad.breaker.failed(0.0)
    good.ours.open_sequences = 50
    placer = Placer(rig.registry, LeastLoad(), 0)
    assert placer.place(Wanted(5)).decode is good
    good.leaving = Leaving(By.NODE)
    assert placer.place(Wanted(5)).decode is bad
