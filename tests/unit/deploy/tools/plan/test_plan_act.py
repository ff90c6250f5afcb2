"""`baton plan act`: which nodes change over, when, and what a router that is away or says no changes about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.metrics_page import parse_page
from deploy.tools.plan.act.act import Actor
from deploy.tools.plan.act.balance import (
    DECODE,
    PREFILL,
    Balancer,
    BalanceSettings,
    ClusterLook,
    Demand,
    NodeLook,
    RoleMove,
    Totals,
    demand_between,
)
from deploy.tools.plan.act.look import look_at
from deploy.tools.plan.act.sizing import Sizing
from shared.core.errors import ConfigError
from shared.core.states import NodeState

PERIOD_S = 2.0
SETTINGS = BalanceSettings(tpot_s=0.05, window_s=10.0)


@dataclass
class Plant:
    """Nodes under a steady load: `work` in nodes of each role. One that changes over is away for `away` looks."""

    prefill: int
    decode: int
    away: int = 3

    def __post_init__(self) -> None:
        self.roles = {f"n{i}": PREFILL if i < self.prefill else DECODE for i in range(self.prefill + self.decode)}
        self.lives = dict.fromkeys(self.roles, 1)
        self.gone: dict[str, int] = {}
        self.now = 0.0
        self.totals = Totals()

    def look(self, work: Demand) -> ClusterLook:
        """100 requests a second of 100 tokens, at 10 ms each: 100 rows. As many rows and tokens as make that `work`."""
        self.now += PERIOD_S
        old = self.totals
        self.totals = Totals(
            arrived=old.arrived + 100 * PERIOD_S,
            ended=old.ended + 100 * PERIOD_S,
            prompt_tokens=old.prompt_tokens + 0.8 * work.prefill * PERIOD_S * 1000,
            output_tokens=old.output_tokens + 10_000 * PERIOD_S,
            gaps=old.gaps + 10_000 * PERIOD_S,
            gaps_s=old.gaps_s + 100 * PERIOD_S,
        )
        rows = 100 / (0.8 * work.decode) if work.decode else 1e9
        for name in [name for name, left in self.gone.items() if left == 0]:
            del self.gone[name]
            self.lives[name] += 1
        self.gone = {name: left - 1 for name, left in self.gone.items()}
        nodes = (
            NodeLook(name, role, NodeState.READY, str(self.lives[name]), 0)
            for name, role in self.roles.items()
            if name not in self.gone
        )
        return ClusterLook(self.now, tuple(nodes), self.totals, 0.001, 0.0, 0.0, rows)

    def take(self, balancer: Balancer, work: Demand) -> int:
        """Let the balancer look once, and do what it says. Return how many nodes changed over."""
        moves = balancer.see(self.look(work))
        for move in moves:
            assert self.roles[move.node] != move.role and move.node not in self.gone
            self.roles[move.node] = move.role
            self.gone[move.node] = self.away
        there = [role for name, role in self.roles.items() if name not in self.gone]
        assert there.count(PREFILL) >= 1 and there.count(DECODE) >= 1, "no role is ever empty"
        return len(moves)


def test_work_is_reckoned_in_nodes() -> None:
    """50 tokens a second at 2 ms are a tenth of a node, 10 answers a second of 20 tokens at 40 ms are 8 rows."""
    first = ClusterLook(10.0, (), Totals(), 0.002, 0.0, 0.0, 10.0)
    totals = Totals(arrived=100, ended=100, prompt_tokens=500, output_tokens=2000, gaps=1900, gaps_s=76.0)
    found = demand_between(first, replace(first, at=20.0, totals=totals), 1.0)
    assert found.prefill == pytest.approx(0.1 / 0.8) and found.decode == pytest.approx(8 / 10 / 0.8)


def test_what_waits_counts_as_work_to_come() -> None:
    first = ClusterLook(0.0, (), Totals(), 0.002, 0.0, 0.0, 10.0)
    totals = Totals(arrived=0, ended=10, output_tokens=200, gaps=190, gaps_s=7.6)
    last = replace(first, at=10.0, totals=totals, waiting_tokens=6000.0, not_decoding=60.0)
    found = demand_between(first, last, 1.0)
    assert found.prefill == pytest.approx(6000 / 60 * 0.002 / 0.8)
    assert found.decode == pytest.approx(60 / 60 * 20 * 0.04 / 10 / 0.8)


def test_tokens_that_come_late_call_for_decode_nodes() -> None:
    node = NodeLook("d", DECODE, NodeState.READY, "1", 0)
    first = ClusterLook(0.0, (node, replace(node, name="e")), Totals(), 0.002, 0.0, 0.0, 1e9)
    last = replace(first, at=10.0, totals=Totals(gaps=100, gaps_s=6.0))
    assert demand_between(first, last, 0.05).decode == pytest.approx(2 * 0.06 / 0.05)
    very_late = replace(last, totals=Totals(gaps=100, gaps_s=600.0))
    assert demand_between(first, very_late, 0.05).decode == pytest.approx(2 * 1.5)


@given(st.floats(0.0, 8.0), st.floats(0.01, 8.0), st.integers(1, 7))
def test_a_steady_load_is_answered_and_then_left_alone(prefill: float, decode: float, num_prefill: int) -> None:
    plant, balancer, work = Plant(num_prefill, 8 - num_prefill), Balancer(SETTINGS), Demand(prefill, decode)
    moved = [plant.take(balancer, work) for _ in range(300)]
    assert not any(moved[150:]), "it comes to rest"
    num = list(plant.roles.values()).count(PREFILL)
    best = work.best(8, 1)
    assert work.pressure(num, 8 - num) < 1.0 or work.pressure(best, 8 - best) >= 0.85 * work.pressure(num, 8 - num)


def test_no_node_moves_where_no_role_is_full() -> None:
    plant, balancer = Plant(1, 7), Balancer(SETTINGS)
    assert sum(plant.take(balancer, Demand(0.99, 0.1)) for _ in range(100)) == 0


def test_a_burst_shorter_than_the_window_moves_nobody() -> None:
    plant, balancer = Plant(4, 4), Balancer(SETTINGS)
    for second in range(200):
        burst = second % 20 == 1  # the first one before there is a window
        assert plant.take(balancer, Demand(9.0 if burst else 1.0, 1.0)) == 0


def test_at_most_half_of_a_role_leaves_at_once() -> None:
    plant, balancer = Plant(1, 7), Balancer(SETTINGS)
    moved = [plant.take(balancer, Demand(7.0, 0.1)) for _ in range(100)]
    assert [num for num in moved if num] == [3, 2], "the last one would gain less than 15 %"


def test_roles_keep_the_least_number_of_nodes() -> None:
    plant, balancer = Plant(4, 4), Balancer(replace(SETTINGS, least=3))
    assert sum(plant.take(balancer, Demand(50.0, 0.0)) for _ in range(100)) == 1


def test_nothing_moves_while_a_node_drains() -> None:
    plant, balancer = Plant(1, 7), Balancer(SETTINGS)
    for _ in range(50):
        look = plant.look(Demand(7.0, 0.1))
        leaving = replace(look.nodes[-1], state=NodeState.DRAINING)
        assert balancer.see(replace(look, nodes=(*look.nodes[:-1], leaving))) == []


def test_a_missing_node_is_waited_for_no_longer_than_stated() -> None:
    plant, balancer = Plant(1, 7, away=10_000), Balancer(replace(SETTINGS, away_s=60.0))
    moved = [plant.take(balancer, Demand(7.0, 0.1)) for _ in range(100)]
    first, second = [index for index, num in enumerate(moved) if num][:2]
    assert 60.0 <= PERIOD_S * (second - first) <= 60.0 + 2 * SETTINGS.window_s


def test_a_load_that_swings_meets_more_and_more_patience() -> None:
    plant, balancer = Plant(4, 4), Balancer(SETTINGS)
    windows, work = [], [Demand(7.5, 0.2), Demand(0.2, 7.5)]
    for index in range(400):
        if plant.take(balancer, work[index // 12 % 2]):
            windows.append(balancer.window_s)
    assert windows[0] == 10.0 and max(windows) == 40.0


def test_a_restarted_command_looks_a_whole_window_before_moving() -> None:
    plant, balancer = Plant(1, 7), Balancer(SETTINGS)
    while not plant.take(balancer, Demand(7.0, 0.1)):
        pass
    away, fresh = set(plant.gone), Balancer(SETTINGS)
    while plant.gone:
        assert plant.take(fresh, Demand(7.0, 0.1)) == 0
    assert {name for name, role in plant.roles.items() if role == PREFILL} == {"n0", *away}


STATUS = {
    "nodes": [
        {
            "node": "prefill-0",
            "role": "prefill",
            "state": "ready",
            "epoch": "a1",
            "open_sequences": 3,
            "open_prompt_tokens": 900,
            "waiting_tokens": 1000,
            "prompt_tokens_per_s": 500.0,
            "rows": {"free": 6, "prefilling": 2},
        },
        {
            "node": "decode-0",
            "role": "decode",
            "state": "draining",
            "epoch": "b2",
            "open_sequences": 5,
            "open_prompt_tokens": 0,
            "waiting_tokens": 0,
            "prompt_tokens_per_s": None,
            "rows": {"free": 3, "running": 4, "granted": 1},
        },
    ]
}
PAGE = """
baton_requests_total{outcome="stop"} 10.0
baton_requests_total{outcome="length"} 5.0
baton_requests_total{outcome="overloaded"} 99.0
baton_open_requests 7.0
baton_prompt_tokens_total{node="prefill-0"} 4000.0
baton_output_tokens_total{node="decode-0"} 300.0
baton_itl_seconds_count 200.0
baton_itl_seconds_sum 5.0
"""


def test_a_look_reads_what_a_router_says() -> None:
    look = look_at(STATUS, parse_page(PAGE), 3.0)
    assert look.totals == Totals(22.0, 15.0, 5000.0, 300.0, 200.0, 5.0), "refused requests are no work"
    assert (look.token_s, look.waiting_tokens, look.not_decoding, look.rows) == (0.002, 1000, 3.0, 8.0)
    assert [node.name for node in look.of(PREFILL)] == ["prefill-0"] and look.of(DECODE) == []


class FakeClient:
    """Answers as a router does: what is listed, one thing after another; an exception is raised."""

    def __init__(self, *statuses: Any) -> None:
        self.statuses, self.ordered, self.refusal = list(statuses), [], ""

    def status(self) -> Any:
        found = self.statuses.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def text(self, path: str) -> str:
        return PAGE

    def call(self, method: str, path: str, body: dict[str, Any]) -> None:
        if self.refusal:
            raise ConfigError(self.refusal)
        self.ordered.append((method, path, body))


class OneMove(Balancer):
    """Wants the first node that it sees in the other role, at each look."""

    def see(self, look: ClusterLook) -> list[RoleMove]:
        return [RoleMove(look.nodes[0].name, DECODE, look.nodes[0].epoch, "why")]


def test_an_unanswering_router_is_reported_once_and_asked_again() -> None:
    said: list[str] = []
    client = FakeClient(ConfigError("no answer"), ConfigError("no answer"), STATUS)
    actor = Actor(client, Balancer(SETTINGS), said.append)  # type: ignore[arg-type]  # speaks as AdminClient
    for now in range(3):
        actor.turn(float(now))
    assert said == ["no answer", "1 prefill and 0 decode nodes; looking"]


def test_an_order_says_how_many_nodes_must_stay() -> None:
    said: list[str] = []
    client = FakeClient(STATUS)
    Actor(client, OneMove(replace(SETTINGS, least=2)), said.append).turn(0.0)  # type: ignore[arg-type]
    assert client.ordered == [("POST", "/admin/role", {"node": "prefill-0", "role": DECODE, "least": 2})]
    assert said[0] == "prefill-0 becomes a decode node: why"


def test_a_dry_run_orders_nothing() -> None:
    said: list[str] = []
    client = FakeClient(STATUS)
    Actor(client, OneMove(SETTINGS), said.append, is_dry=True).turn(0.0)  # type: ignore[arg-type]
    assert not client.ordered and said[0].endswith("(dry run)")


def test_a_refused_order_is_not_waited_for() -> None:
    said: list[str] = []
    client, plant, balancer = FakeClient(STATUS, STATUS), Plant(1, 7), Balancer(SETTINGS)
    moves: list[RoleMove] = []
    while not moves:
        moves = balancer.see(plant.look(Demand(7.0, 0.1)))
    for move in moves:
        balancer.refused(move)
    client.refusal = "it must keep 1"
    Actor(client, OneMove(SETTINGS), said.append).turn(0.0)  # type: ignore[arg-type]
    assert said[1] == "prefill-0 stays as it is: it must keep 1"
    assert not balancer.see(plant.look(Demand(7.0, 0.1))) and balancer.demand is None, "it looks for a window again"
    while not balancer.see(plant.look(Demand(7.0, 0.1))):
        assert plant.now < 1000


class OneWish(Sizing):
    """Wants the first node to change its role, at each look. `demands`: what it was told."""

    def __init__(self) -> None:
        self.demands: list[Demand | None] = []

    def turn(self, look: ClusterLook, demand: Demand | None) -> RoleMove | None:
        self.demands.append(demand)
        return RoleMove(look.nodes[0].name, DECODE, look.nodes[0].epoch, "why")


def test_a_move_for_the_size_is_ordered_and_waited_for() -> None:
    client, balancer, sizing = FakeClient(STATUS, STATUS), Balancer(SETTINGS), OneWish()
    actor = Actor(client, balancer, lambda line: None, sizing=sizing)  # type: ignore[arg-type]
    actor.turn(0.0)
    assert client.ordered == [("POST", "/admin/role", {"node": "prefill-0", "role": DECODE, "least": 1})]
    assert balancer._leaving.keys() == {"prefill-0"}


def test_the_size_is_not_judged_while_roles_change() -> None:
    sizing, balancer = OneWish(), OneMove(SETTINGS)
    balancer.demand = Demand(9.0, 9.0)
    actor = Actor(FakeClient(STATUS), balancer, lambda line: None, sizing=sizing)  # type: ignore[arg-type]
    actor.turn(0.0)
    assert sizing.demands == [None]
