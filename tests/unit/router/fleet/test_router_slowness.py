"""Nodes whose steps take longer than their peers': who is slow, what such a node gets, and how it comes back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from deploy.cluster.admin import table
from router.api.admin.admin import node_status
from router.dispatch.moves import MOVE_AFTER_S
from router.fleet.leaving import By, Leaving
from router.fleet.prompt_cost import COUNTERS, FRESH_S
from router.fleet.registry import RegisteredNode, not_held_back
from router.fleet.slowness import FACTOR, FAR, MOST_PEERS, MOST_SMOOTHED_S, QUIET_S, Share, Slowness, Steps
from router.policy.interface import Wanted
from router.policy.least_load import LeastLoad
from router.policy.placement import Placer
from router.policy.policies import make_policy
from shared.wire.messages import Heartbeat, NodeLoad
from shared.wire.peers import Received
from tests.support.worlds.gateway_rig import GatewayRig
from tests.support.worlds.router_rig import FINGERPRINT, RouterRig

BEAT_S = 0.5
STEP_S = 0.02
NAMES = ("a", "b", "c", "d")
OTHER_MODEL = msgspec.structs.replace(FINGERPRINT, model="other")
NEIGHBOUR = msgspec.structs.replace(FINGERPRINT, protocol=FINGERPRINT.protocol - 1)


def decoding(
    step_s: float, running: int = 8, active: int = 80, width: int = 1, prompts: int = 0, pause_s: float = 0.0
) -> NodeLoad:
    """Twenty steps of decoding, the last with a pause, and `prompts` steps with prompts, each of which delays the step
    behind it."""
    samples = [step_s] * 19 + [step_s + pause_s] + [50 * step_s] * (2 * prompts)
    rows = {"free": 64 - running, "running": running}
    pages = {"free": 1000 - active, "active": active}
    return NodeLoad(1000, pages, 64, rows, 0, 0, width, {}, {"step_seconds": samples} if running else {}, {}, "")


class Site(RouterRig):
    """Nodes of one role. Each round is a heartbeat of each node."""

    def __init__(self, names: Sequence[str] = NAMES, role: str = "decode", policy: str = "least_load") -> None:
        super().__init__(policy=policy)
        self.role, self.placer = role, Placer(self.registry, make_policy(policy), 0)
        self.nodes = {name: self.join(role, name) for name in names}
        self.totals = {name: [0.0, 0.0, 0.0] for name in names}
        self.news: list[tuple[str, Share]] = []

    def beat(self, name: str, load: NodeLoad) -> None:
        node = self.nodes[name]
        counters = dict(zip(COUNTERS, self.totals[name], strict=True))
        self.registry.heartbeat(Heartbeat(name, 1, msgspec.structs.replace(load, counters=counters), False), self.now)
        if (share := node.figures.slowness.take_news()) is not None:
            self.news.append((name, share))

    def round(self, **loads: NodeLoad) -> None:
        """Nodes that are not named take STEP_S for a step."""
        self.now += BEAT_S
        for name in self.nodes:
            self.beat(name, loads.get(name, decoding(STEP_S)))

    def rounds(self, seconds: float, **loads: NodeLoad) -> Site:
        for _ in range(round(seconds / BEAT_S)):
            self.round(**loads)
        return self

    def prompts(self, seconds: float, tokens: int = 200, **step_s: float) -> Site:
        """Prefill nodes, each with four prompts a round."""
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for name, node in self.nodes.items():
                more = (4, 4 * tokens, 4 * step_s.get(name, STEP_S))
                self.totals[name] = [sum(both) for both in zip(self.totals[name], more, strict=True)]
                self.beat(name, decoding(1.0, 0) if node.report.load is None else node.report.load)
        return self

    def place(self) -> str:
        """Where a request of one sequence goes. It stays."""
        placed = self.placer.place(Wanted(20, self.now))
        node = placed.decode or placed.prefill
        assert node is not None
        node.ours.open_sequences += 1
        return node.node_id

    def share(self, name: str = "d") -> Share:
        return self.nodes[name].figures.slowness.share

    def times(self, name: str = "d") -> float:
        return self.nodes[name].figures.slowness.times


def slow(times: float, running: int = 8) -> NodeLoad:
    return decoding(times * STEP_S, running)


def idle() -> NodeLoad:
    return decoding(STEP_S, 0, 0)


# ---- who is slow


def test_a_slow_node_is_eased_out_and_comes_back() -> None:
    site = Site().rounds(5.0)
    site.rounds(15.0, d=slow(3.0))
    assert site.share() is Share.EASED and site.times() == pytest.approx(3.0, rel=0.05)
    site.rounds(5.0, d=slow(1.0))
    assert site.share() is Share.EASED, "not at once"
    site.rounds(10.0, d=slow(1.0))
    assert site.share() is Share.WHOLE and site.times() < 1.1
    assert site.news == [("d", Share.EASED), ("d", Share.WHOLE)]


def test_a_short_delay_eases_nobody() -> None:
    site = Site().rounds(5.0)
    for _ in range(10):
        site.rounds(2.5, d=slow(3.0)).rounds(8.0)
    assert not site.news


def test_a_node_that_pauses_in_each_round_is_slow() -> None:
    """As a container above its CPU limit: nearly all of its steps are as fast as its peers'."""
    site = Site().rounds(15.0, d=decoding(STEP_S, pause_s=40 * STEP_S))
    assert site.news == [("d", Share.EASED)] and site.times() == pytest.approx(3.0, rel=0.05)


def test_less_than_the_factor_eases_nobody() -> None:
    assert not Site().rounds(60.0, d=slow(0.98 * FACTOR)).news
    assert Site().rounds(60.0, d=slow(1.05 * FACTOR)).news == [("d", Share.EASED)]


def test_most_nodes_are_never_slow() -> None:
    site = Site(("a", "b", "c")).rounds(60.0, b=slow(6.0), c=slow(6.0))
    assert not site.news
    two = Site().rounds(60.0, c=slow(3.0), d=slow(3.0))
    assert sorted(two.news) == [("c", Share.EASED), ("d", Share.EASED)]


@pytest.mark.parametrize(
    "load",
    [decoding(4 * STEP_S, 32), decoding(4 * STEP_S, active=320), decoding(4 * STEP_S, width=4)],
    ids=["rows", "long texts", "drafts"],
)
def test_a_node_with_more_work_is_not_slow(load: NodeLoad) -> None:
    assert not Site().rounds(60.0, d=load).news
    assert Site().rounds(60.0, d=decoding(4 * STEP_S)).news, "as much work"


def test_a_node_that_has_less_work_may_not_take_longer() -> None:
    site = Site().rounds(20.0, d=decoding(3 * STEP_S, 2, 20))
    assert site.share() is Share.EASED and site.times() == pytest.approx(3.0, rel=0.05)


def test_two_nodes_are_not_compared() -> None:
    assert not Site(("a", "d")).rounds(60.0, d=slow(6.0)).news
    assert Site(("a", "b", "d")).rounds(60.0, d=slow(3.0)).news


def test_each_report_is_compared_with_a_few_peers() -> None:
    asked = 0

    class Counted(Slowness):
        def steps(self, now: float) -> Steps | None:
            nonlocal asked
            asked += 1
            return Steps(STEP_S, 8, 80)

    Counted().judge((Counted() for _ in range(10 * MOST_PEERS)), 1.0)
    assert asked == 1 + MOST_PEERS


def test_nodes_of_other_kinds_are_no_peers() -> None:
    site = Site(("a", "d"))
    for name in ("b", "c"):
        site.nodes[name] = site.join("decode", name, fingerprint=OTHER_MODEL)
        site.totals[name] = [0.0] * 3
    assert not site.rounds(60.0, d=slow(6.0)).news
    site.nodes["e"], site.totals["e"] = site.join("decode", "e"), [0.0] * 3
    assert site.rounds(20.0, d=slow(3.0)).news == [("d", Share.EASED)]


def test_nodes_of_neighbouring_versions_are_peers() -> None:
    """Else none of four nodes would be judged when two of them are upgraded."""
    site = Site(("a", "d"))
    for name in ("b", "c"):
        site.nodes[name] = site.join("decode", name, fingerprint=NEIGHBOUR)
        site.totals[name] = [0.0] * 3
    assert site.rounds(20.0, d=slow(3.0)).news == [("d", Share.EASED)]
    site.registry.remove(site.nodes.pop("b"))
    site.registry.remove(site.nodes.pop("c"))
    assert site.rounds(1.0, d=slow(3.0)).share() is Share.WHOLE, "these are peers no more"
    assert not site.nodes["d"].kind.neighbours, "kinds that come and go don't pile up"


@pytest.mark.parametrize("what", ["drains", "is silent", "is avoided"])
def test_nodes_that_take_no_requests_are_no_peers(what: str) -> None:
    site = Site(("a", "b", "d")).rounds(20.0, d=slow(3.0))
    assert site.share() is Share.EASED
    away = site.nodes.pop("b")
    away.leaving, away.is_silent = Leaving(By.NODE) if what == "drains" else None, what == "is silent"
    if what == "is avoided":
        for _ in range(3):
            away.breaker.failed(site.now)
    site.round(d=slow(3.0))
    assert site.share() is Share.WHOLE and site.news[-1] == ("d", Share.WHOLE)


def test_old_steps_count_no_more() -> None:
    site = Site().rounds(20.0, d=slow(3.0))
    site.rounds(FRESH_S - BEAT_S, d=idle())
    assert site.share() is Share.EASED
    site.rounds(2 * BEAT_S, d=idle())
    assert site.share() is Share.WHOLE


def test_steps_with_prompts_do_not_make_a_node_slow() -> None:
    def mixed() -> NodeLoad:
        return decoding(STEP_S, prompts=12)

    site = Site()
    for _ in range(100):
        site.totals["d"] = [sum(both) for both in zip(site.totals["d"], (12, 1200, 12.0), strict=True)]
        site.round(d=mixed())
    assert not site.news and site.times() == 1.0


def test_a_few_steps_or_odd_ones_are_no_measure() -> None:
    few = msgspec.structs.replace(slow(6.0), observations={"step_seconds": [1.0] * 3})
    below = msgspec.structs.replace(slow(6.0), observations={"step_seconds": [-1.0] * 20})
    long = msgspec.structs.replace(slow(6.0), observations={"step_seconds": [1e9] * 20})
    no_width = msgspec.structs.replace(slow(1.0), spec_width=0)
    assert not Site().rounds(30.0, b=few, c=below, d=slow(6.0)).news
    assert not Site().rounds(30.0, a=no_width, c=long).news


# ---- what a slow node gets


def test_sequences_of_a_slow_node_count_by_its_slowness() -> None:
    site = Site().rounds(30.0, d=slow(3.0))
    site.rounds(BEAT_S, **dict.fromkeys(NAMES, idle()))
    went = [site.place() for _ in range(100)]
    assert {name: went.count(name) for name in NAMES} == {"a": 30, "b": 30, "c": 30, "d": 10}
    assert "d" not in went[:6], "with little work it would only be slower"


def test_a_slow_prefill_node_gets_fewer_prompts() -> None:
    site = Site(role="prefill").prompts(30.0, d=3 * STEP_S)
    assert site.share() is Share.EASED
    for node in site.nodes.values():
        node.ours.open_prompt_tokens = node.ours.open_prompt_work = 300
    site.nodes["d"].ours.open_prompt_tokens = site.nodes["d"].ours.open_prompt_work = 101
    assert LeastLoad().pick(list(site.nodes.values()), Wanted(20, site.now)).node.node_id != "d"
    site.nodes["d"].ours.open_prompt_tokens = site.nodes["d"].ours.open_prompt_work = 99
    assert LeastLoad().pick(list(site.nodes.values()), Wanted(20, site.now)).node.node_id == "d"


def test_measured_prompt_speed_counts_once() -> None:
    """prefix_aware compares measured nodes by seconds, which have the slowness in them."""
    site = Site(role="prefill", policy="prefix_aware").prompts(30.0, d=3 * STEP_S)
    nodes = list(site.nodes.values())
    for node in nodes:
        node.ours.open_prompt_tokens = node.ours.open_prompt_work = 600
    site.nodes["d"].ours.open_prompt_tokens = site.nodes["d"].ours.open_prompt_work = (
        120  # 3 x 140 < 620 / 1.25, and 9 x 140 is not
    )
    assert make_policy("prefix_aware").pick(nodes, Wanted(20, site.now)).node.node_id == "d"
    unmeasured = site.join("prefill", "new")
    unmeasured.ours.open_prompt_tokens = unmeasured.ours.open_prompt_work = 600
    site.nodes["d"].ours.open_prompt_tokens = site.nodes["d"].ours.open_prompt_work = 300  # 3 x 320 > 620
    assert make_policy("prefix_aware").pick([*nodes, unmeasured], Wanted(20, site.now)).node.node_id != "d"


def test_prefix_aware_weighs_the_sequences_of_slow_nodes() -> None:
    site = Site(policy="prefix_aware").rounds(30.0, d=slow(3.0))
    site.rounds(BEAT_S, **dict.fromkeys(NAMES, idle()))
    went = [site.place() for _ in range(100)]
    assert went.count("d") == 10


def test_a_far_slower_node_gets_one_request_at_a_time() -> None:
    site = Site().rounds(10.0, d=slow(8.0))
    assert site.share() is Share.EASED
    site.rounds(10.0, d=slow(8.0))
    assert site.share() is Share.TRICKLE and site.news == [("d", Share.EASED)]
    site.rounds(BEAT_S, **dict.fromkeys(NAMES, idle()))
    went = [site.place() for _ in range(200)]
    assert went.count("d") == 1
    site.nodes["d"].ours.open_sequences = 0
    assert "d" in [site.place() for _ in range(3)]


def test_a_far_slower_prefill_node_gets_one_prompt_at_a_time() -> None:
    site = Site(role="prefill").prompts(30.0, d=8 * STEP_S)
    node = site.nodes["d"]
    assert site.share() is Share.TRICKLE and not node.is_held_back
    node.ours.open_prompt_tokens = node.ours.open_prompt_work = 20
    for other in site.nodes.values():
        other.ours.open_prompt_tokens += 10_000
        other.ours.open_prompt_work += 10_000
    assert node.is_held_back and site.place() != "d"


def test_a_node_that_is_held_back_is_better_than_none() -> None:
    site = Site().rounds(30.0, d=slow(8.0))
    node = site.nodes["d"]
    node.ours.open_sequences = 1
    assert node.is_held_back and list(not_held_back([node])) == [node]
    others = {site.nodes[name].peer for name in "abc"}
    assert site.placer.place(Wanted(20, site.now), avoid=others).decode is node
    for name in "abc":
        site.nodes[name].leaving = Leaving(By.NODE)
    assert site.place() == "d"
    assert site.open(rounds=3), "its room counts, too"


def test_room_of_a_node_that_is_held_back_is_none() -> None:
    site = Site().rounds(30.0, d=slow(8.0, running=1))
    full = msgspec.structs.replace(slow(1.0, running=64), waiting=16, waiting_tokens=16)
    site.rounds(BEAT_S, a=full, b=full, c=full, d=slow(8.0, running=1))
    for name in "abc":
        site.nodes[name].ours.open_sequences = 80
    assert site.share() is Share.TRICKLE
    assert not site.open(rounds=3), "they wait in the router, not behind others at full nodes"


def test_requests_do_not_move_to_a_node_that_is_held_back() -> None:
    site = Site().rounds(30.0, d=slow(8.0))
    prefill = site.join("prefill", "p")
    for name in "abc":
        site.nodes[name].leaving = None if name == "a" else Leaving(By.NODE)
    site.nodes["d"].leaving = Leaving(By.NODE)
    (sent,) = site.open([1] * 32)
    assert sent.decode_node == "a"
    site.run(prefill, sent.key, 0, [5])
    site.nodes["d"].leaving = None
    no_room = msgspec.structs.replace(decoding(STEP_S, 7, 1000), waiting=3, waiting_tokens=3)
    site.nodes["a"].reported(no_room)
    site.nodes["d"].reported(decoding(STEP_S, 1))
    assert not moves(site)
    site.nodes["d"].figures.slowness.share = Share.EASED
    assert moves(site) == ["d"], "it could have moved"


def moves(site: Site) -> list[str]:
    begin, gone = site.now, []
    while site.now < begin + 2 * MOVE_AFTER_S:
        site.now += 0.25
        gone += [m.decode_node for _, m in site.dispatcher.tick(site.now).sends if hasattr(m, "decode_node")]
    return gone


# ---- how it comes back


def test_an_idle_slow_node_gets_a_request_now_and_then() -> None:
    site = Site().rounds(30.0, d=slow(3.0))
    site.rounds(QUIET_S, **dict.fromkeys(NAMES, idle()))
    assert "d" not in [site.place() for _ in range(3)]
    for node in site.nodes.values():
        node.ours.open_sequences = 0
    site.rounds(2 * BEAT_S, **dict.fromkeys(NAMES, idle()))
    went = [site.place() for _ in range(12)]
    assert "d" in went[:4] and went.count("d") == 1, "one, until it has shown what it takes"


def test_after_the_trickle_a_node_gets_work_to_be_judged_by() -> None:
    """Where time grows with the work, one request is fast on any node."""
    site = Site().rounds(30.0, d=slow(8.0))
    while site.share() is Share.TRICKLE:
        site.round(d=slow(1.0, running=1))
    assert site.share() is Share.EASED and site.times() == FAR
    assert site.news == [("d", Share.EASED)], "it is not back yet"
    site.rounds(20.0, d=slow(1.0))
    assert site.news[1:] == [("d", Share.WHOLE)]


@pytest.mark.parametrize("grows", [0.0, 0.5, 1.0], ids=["flat", "half", "steep"])
@pytest.mark.parametrize("times", [1.7, 2.2, 3.0, 5.0, 12.0])
def test_less_work_does_not_bring_a_slow_node_back(times: float, grows: float) -> None:
    """The node's running sequences follow what it is given, in the ten seconds that they last."""
    site, rng, running = Site().rounds(5.0), random.Random(7), 32.0
    for _ in range(600):
        running += (given(site.nodes["d"]) - running) * BEAT_S / 10.0
        seconds = times * STEP_S * (max(1.0, running) / 32) ** grows * rng.uniform(0.93, 1.07)
        others = {name: decoding(STEP_S * rng.uniform(0.93, 1.07), 32) for name in "abc"}
        site.round(d=decoding(seconds, max(1, round(running))), **others)
    assert site.news == [("d", Share.EASED)]
    for _ in range(200):
        running += (given(site.nodes["d"]) - running) * BEAT_S / 10.0
        seconds = STEP_S * (max(1.0, running) / 32) ** grows
        site.round(d=decoding(seconds, max(1, round(running))), **dict.fromkeys("abc", decoding(STEP_S, 32)))
    assert site.news == [("d", Share.EASED), ("d", Share.WHOLE)]


def given(node: RegisteredNode) -> float:
    return 1.0 if node.figures.slowness.share is Share.TRICKLE else 32 / node.figures.slowness.weight


def test_one_report_after_a_rest_does_not_decide() -> None:
    site = Site().rounds(30.0, d=slow(3.0))
    site.rounds(30.0, d=idle())
    site.round(d=slow(1.0))
    assert site.times() > 2.0 and MOST_SMOOTHED_S < 2.0


# ---- who is told


def test_operators_see_slow_nodes() -> None:
    site = Site()
    told = GatewayRig(site)
    page = told.metrics

    def beats(seconds: float, times: float) -> list[str]:
        told.log.truncate(told.log.seek(0))
        for _ in range(round(seconds / BEAT_S)):
            site.now += BEAT_S
            for name, node in site.nodes.items():
                load = slow(times if name == "d" else 1.0)
                told.gateway.handle(Received(node.peer, Heartbeat(name, 1, load, False)))
        return told.log.getvalue().splitlines()

    out = beats(20.0, 3.0)
    assert ["slower than its peers" in line and "node=d" in line for line in out] == [True]
    assert slowness(page, "d") == pytest.approx(3.0, rel=0.05) and slowness(page, "a") == 1.0
    assert printed(site) == ["d is slow: 3.0 times its peers' time per step; it gets less work"]
    assert not beats(30.0, 6.0), "said once"
    assert printed(site) == ["d is slow: 6.0 times its peers' time per step; it gets one request at a time"]
    back = beats(40.0, 1.0)
    assert ["as fast as its peers again" in line and "node=d" in line for line in back] == [True]
    assert not printed(site) and slowness(page, "d") == pytest.approx(1.0, abs=0.1)
    told.gateway._on_gone(site.nodes["d"].peer, "", site.now)
    assert slowness(page, "d") is None


def slowness(page: CollectorRegistry, node: str) -> float | None:
    return page.get_sample_value("baton_node_slowness", {"node": node, "role": "decode"})


def printed(site: Site) -> list[str]:
    rows = [node_status(node, site.now) for node in site.nodes.values()]
    lines = table({"open_requests": 0, "nodes": rows}).splitlines()
    bare = [{name: row[name] for name in row if name not in ("share", "slowness")} for row in rows]
    assert len(table({"open_requests": 0, "nodes": bare}).splitlines()) == 1 + 1 + len(rows), "of an older router"
    return [line for line in lines if " is slow: " in line]
