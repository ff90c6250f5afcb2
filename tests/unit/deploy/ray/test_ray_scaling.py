"""The scaling policy in virtual time: never beyond its limits, no swinging, no step without a lasting reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.metrics_page import parse_page
from deploy.ray.scaling import REMEMBERED_S, RoleLoad, RoleScaler
from deploy.ray.signals import load_of
from shared.config.settings.ray_settings import ScalingConfig

SETTINGS = ScalingConfig(busy_rows=0.8, busy_waiting=4.0, up_after_s=15, down_after_s=180, settle_s=30, slo_itl_ms=50)
TICK_S = 5.0
work = st.floats(0.0, 12.0)  # in nodes' full loads


@dataclass
class Plant:
    """`work` spread over the nodes; what does not fit waits. Latency grows with what one node has, from `base`."""

    nodes: int
    base: float = 0.0

    def load(self, work: float) -> RoleLoad:
        each = work / self.nodes
        waiting = max(0.0, each - 1.0) * self.nodes * SETTINGS.busy_waiting
        return RoleLoad(self.nodes, waiting, min(1.0, each * SETTINGS.busy_rows), self.base * each)


def play(
    work_at: Callable[[float], float], until_s: float, nodes: int = 2, base: float = 0.0, most: int = 8
) -> list[tuple[float, int]]:
    """Every change with its time. Limits hold all the time."""
    scaler, plant, changes, now = RoleScaler(2, most, SETTINGS), Plant(nodes, base), [], 0.0
    while now < until_s:
        step = scaler.decide(now, plant.load(work_at(now)))
        plant.nodes += step
        assert 2 <= plant.nodes <= most
        if step:
            changes.append((now, step))
        now += TICK_S
    return changes


@given(work, st.integers(2, 8), st.floats(0.0, 1.6))
def test_a_constant_load_is_answered_once(work, nodes, base):
    """From any size it moves one way and rests; with a latency that more nodes do or do not cure."""
    changes = play(lambda _: work, REMEMBERED_S - TICK_S, nodes, base)
    down_then_up = [step for _, step in changes]
    assert down_then_up == sorted(down_then_up) or down_then_up == sorted(down_then_up, reverse=True)
    turns = sum(a != b for a, b in zip(down_then_up, down_then_up[1:], strict=False))
    assert turns <= 1 and (not turns or base > 0), "only a latency that was not foreseen may bring a node back"
    assert all(when < 8 * (SETTINGS.down_after_s + SETTINGS.settle_s) for when, _ in changes), "it comes to rest"


@given(st.lists(work, min_size=1, max_size=40))
def test_changes_are_apart(levels):
    changes = play(lambda now: levels[int(now // 60) % len(levels)], 2400.0)
    gaps = [b[0] - a[0] for a, b in zip(changes, changes[1:], strict=False)]
    assert all(gap >= SETTINGS.settle_s for gap in gaps)


@given(st.floats(2.3, 8.0))
def test_a_lasting_overload_gets_the_nodes_it_needs(work):
    changes = play(lambda _: work, 600.0)
    assert 2 + sum(step for _, step in changes) >= work - 0.001 or 2 + sum(s for _, s in changes) == 8


def test_when_the_load_is_gone_it_goes_back_to_the_least():
    changes = play(lambda now: 6.0 if now < 600 else 0.1, 4000.0)
    assert sum(step for _, step in changes) == 0 and sum(step > 0 for _, step in changes) >= 4


def test_a_burst_shorter_than_the_wait_changes_nothing():
    assert play(lambda now: 9.0 if now % 60 < 10 else 1.0, 1200.0) == []


@pytest.mark.parametrize("gap", [None, RoleLoad(0, 0.0, 0.0, 0.0)])
def test_without_figures_the_waits_begin_again(gap):
    scaler, full = RoleScaler(1, 4, SETTINGS), RoleLoad(2, 20.0, 1.0, 0.0)
    assert [scaler.decide(now, full) for now in (0.0, 14.0)] == [0, 0]
    assert scaler.decide(14.5, gap) == 0
    assert [scaler.decide(now, full) for now in (15.0, 29.0, 30.0)] == [0, 0, 1]


def test_a_missed_objective_counts_only_under_load():
    idle, loaded = RoleLoad(2, 0.0, 0.1, 3.0), RoleLoad(2, 0.0, 0.4, 3.0)
    for load, wanted in ((idle, 0), (loaded, 1)):
        scaler = RoleScaler(1, 4, SETTINGS)
        assert [scaler.decide(now, load) for now in (0.0, 20.0)] == [0, wanted]


def test_pressure_that_missed_latency_counts_as_full_for_a_while():
    scaler = RoleScaler(1, 4, replace(SETTINGS, settle_s=0))
    assert [scaler.decide(now, RoleLoad(2, 0.0, 0.4, 1.2)) for now in (0.0, 20.0)] == [0, 1]
    calm = RoleLoad(3, 0.0, 0.8 / 3, 0.8)  # on two nodes 0.5 of full: room, if it had not been too slow there
    assert [scaler.decide(now, calm) for now in (30.0, 300.0, 3000.0)] == [0, 0, 0]
    late = 20.0 + REMEMBERED_S
    assert [scaler.decide(now, calm) for now in (late, late + 180.0)] == [0, -1]


PAGE = """
baton_kv_pool_pages{node="decode-0",role="decode"} 100
baton_kv_pool_pages{node="decode-1",role="decode"} 100
baton_kv_pages{node="decode-0",role="decode",state="free"} 50
baton_kv_pages{node="decode-0",role="decode",state="active"} 50
baton_kv_pages{node="decode-1",role="decode",state="cached"} 100
baton_request_rows{node="decode-0",role="decode",state="running"} 6
baton_request_rows{node="decode-0",role="decode",state="free"} 2
baton_request_rows{node="decode-1",role="decode",state="free"} 8
baton_waiting_requests{node="decode-0",role="decode"} 3
baton_waiting_requests{node="decode-1",role="decode"} 1
baton_waiting_requests{node="prefill-0",role="prefill"} 9
"""


def page(count: int, seconds: float) -> str:
    return f"{PAGE}baton_itl_seconds_count {count}\nbaton_itl_seconds_sum {seconds}\n"


def test_load_is_read_from_the_routers_pages():
    """Gauges from one router, latencies from what all of them saw since; one that began anew counts from zero."""
    before = [parse_page(page(100, 9.0)), parse_page(page(50, 1.0))]
    after = [parse_page(page(130, 12.0)), parse_page(page(60, 2.0))]
    load = load_of("decode", before, after, SETTINGS)
    assert load == RoleLoad(nodes=2, waiting=4.0, busy=6 / 16, latency=pytest.approx(1000 * 4.0 / 40 / 50))
    assert load_of("decode", before, [parse_page(page(0, 0.0))] * 2, SETTINGS).latency == 0.0
    assert load_of("prefill", before, after, SETTINGS) is None and load_of("decode", [], [], SETTINGS) is None
