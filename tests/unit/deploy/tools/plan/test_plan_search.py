"""Which layout is found, over made-up forecasts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.search import fewest_machines, find_fewest, find_plan, in_small, splits
from deploy.tools.plan.simulate import Forecast, rank
from deploy.tools.traffic.figures.figures import Estimate
from deploy.tools.traffic.figures.summary import Lag, Summary
from deploy.tools.traffic.load_plan import LoadPlan
from tests.support.worlds import plan_cases as made

PLAN = made.plan("--rate", "4", "--prompt-tokens", "200", "--output-tokens", "50")


def exact(value: float) -> Estimate:
    return Estimate(value, value, value)


def made_up(layout: ClusterLayout, share: float, ttft: float = 0.5) -> Forecast:
    levels = {level: exact(ttft) for level in ("mean", "p50", "p90", "p95", "p99", "max")}
    summary = Summary(
        seconds=10.0,
        num_requests=40,
        num_ok=40,
        num_failed=0,
        num_hung_up=0,
        prompt_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        latencies=dict.fromkeys(("ttft", "itl", "tpot", "e2e"), levels),
        requests_per_s=exact(4.0),
        output_tokens_per_s=exact(200.0),
        slo="",
        slo_share=exact(share),
        goodput=exact(4.0 * share),
        smooth_goodput=exact(math.nan),
        lag=Lag(),
    )
    return Forecast(layout, summary, {})


def forecaster(share: Callable[[ClusterLayout], float]) -> Callable[[ClusterLayout, LoadPlan], Forecast]:
    return lambda layout, load: made_up(layout, share(layout))


def test_disaggregation_must_be_worth_something() -> None:
    even = find_plan(made.profile(), PLAN, 2, forecaster(lambda layout: 0.9 + 0.02 * layout.is_disaggregated))
    assert not even.best.layout.is_disaggregated and even.other is not None and even.other.layout.is_disaggregated
    better = find_plan(made.profile(), PLAN, 2, forecaster(lambda layout: 0.5 + 0.4 * layout.is_disaggregated))
    assert better.best.layout.is_disaggregated


def test_one_machine_of_one_node_can_only_aggregate() -> None:
    alone = made.profile()
    alone.nodes.pop(1)
    found = find_plan(alone, PLAN, 1, forecaster(lambda layout: 1.0))
    assert found.disaggregated is None and found.best.layout.num_nodes == 1


def test_all_nodes_of_a_split_are_used_and_both_kinds_are_there() -> None:
    tried = list(splits(made.profile(), PLAN, 8))
    assert {layout.num_nodes for layout in tried} == {8, 16}
    assert all(layout.decode >= 1 for layout in tried)
    assert sum(not layout.is_disaggregated for layout in tried) == 2
    assert len(tried) <= 12


def test_settings_are_tuned_one_at_a_time() -> None:
    def share(layout: ClusterLayout) -> float:
        return 0.5 + 0.1 * (layout.mixed_chunk_size == 128) + 0.1 * (layout.chunk_size == 512)

    found = find_plan(made.profile(), PLAN, 1, forecaster(share))
    assert (found.best.layout.mixed_chunk_size, found.best.layout.chunk_size) == (128, 512)
    assert found.tried[0].share == found.best.share


def test_the_fewest_machines_are_found_and_too_few_said() -> None:
    def needs_13(layout: ClusterLayout, load: LoadPlan) -> Forecast:
        assert load.load.arrivals is not None
        return made_up(layout, float(layout.num_nodes * layout.cores / load.load.arrivals.rate >= 2 * 13 / 4))

    assert fewest_machines(made.profile(), PLAN, 64, 0.9, needs_13) == 13
    assert fewest_machines(made.profile(), PLAN, 8, 0.9, needs_13) is None


def test_many_machines_are_searched_in_small_and_found_in_full() -> None:
    seen: list[tuple[int, float]] = []

    def share(layout: ClusterLayout, load: LoadPlan) -> Forecast:
        assert load.load.arrivals is not None
        seen.append((layout.num_nodes * layout.cores, load.load.arrivals.rate))
        wanted = abs(layout.prefill / layout.num_nodes - 0.25)
        return made_up(layout, 0.9 - wanted if layout.is_disaggregated else 0.5)

    plan = made.plan("--rate", "400")
    found = find_plan(made.profile(), plan, 100, share)
    assert {(size, rate) for size, rate in seen} == {(8, 16.0), (200, 400.0)}
    assert sum(size == 200 for size, _ in seen) <= 4
    assert found.best.layout.num_nodes * found.best.layout.cores == 200
    assert found.best.layout.prefill / found.best.layout.num_nodes == pytest.approx(0.25, abs=0.1)


def sent(plan: LoadPlan) -> list[float]:
    """When, over the whole of an open loop whose requests end at once."""
    driver, at = plan.load.driver([], 1), []
    while (due := driver.next_at()) is not None:
        for request in driver.take_requests(due):
            at.append(request.due)
            driver.ended(request.number, "", due, may_go_on=True)
    return at


def test_in_small_a_load_is_as_long_and_less_dense() -> None:
    whole = made.plan("--rate", "400", "--requests", "12000")
    few, small = in_small(whole, 100)
    assert (few, small.load.num_requests) == (4, 480)
    assert max(sent(small)) == pytest.approx(max(sent(whole)), rel=0.2)


def test_in_small_there_are_enough_requests_to_tell_anything() -> None:
    few, small = in_small(made.plan("--rate", "20", "--requests", "1000"), 100)
    assert (few, small.load.num_requests) == (20, 200)
    thin = made.plan("--rate", "1")
    assert in_small(thin, 100) == (100, thin), "60 requests are few enough for all machines"
    _, ramp = in_small(made.plan("--rate", "100", "--arrivals", "ramp:300"), 100)
    assert ramp.load.arrivals is not None, "it goes as far"
    assert (ramp.load.arrivals.rate, ramp.load.arrivals.value) == (4.0, 12.0)


def test_a_trace_in_small_is_every_so_manieth_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10 * i, "input_length": 20, "output_length": 3, "hash_ids": [i]} for i in range(9000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    whole = made.plan("--trace", str(path))
    few, small = in_small(whole, 100)
    assert few == 4 and small.load.duration_s == whole.load.duration_s
    at = sent(small)
    assert len(at) == 360 and max(at) == pytest.approx(90, abs=0.3)
    assert max(later - earlier for earlier, later in zip(at, at[1:], strict=False)) == pytest.approx(0.25)


def test_a_closed_loop_in_small_has_fewer_users() -> None:
    few, small = in_small(made.plan("--concurrency", "300", "--duration", "50"), 100)
    assert (few, small.load.users) == (4, 12)
    lonely = made.plan("--concurrency", "3", "--duration", "50")
    assert in_small(lonely, 100) == (100, lonely)


def test_fewest_holds_in_full_and_steps_up_where_it_does_not() -> None:
    def full_needs_more(layout: ClusterLayout, load: LoadPlan) -> Forecast:
        assert load.load.arrivals is not None
        cores, is_full = layout.num_nodes * layout.cores, load.load.arrivals.rate == 400
        return made_up(layout, float(cores / load.load.arrivals.rate >= (0.33 if is_full and cores > 16 else 0.3)))

    machines, finding = find_fewest(made.profile(), made.plan("--rate", "400"), 512, 0.9, full_needs_more)
    assert machines == 66 and finding.best.share == 1.0  # 60 in small, 63 are too few as well
    nobody, finding = find_fewest(made.profile(), made.plan("--rate", "400"), 62, 0.9, full_needs_more)
    assert nobody is None and finding.best.layout.num_nodes * finding.best.layout.cores == 124


def test_answers_of_one_token_are_ranked_by_what_they_have() -> None:
    def without_tpot(ttft: float) -> Forecast:
        found = made_up(ClusterLayout(0, 1, 1, 1, 1, 1, 1), 0.9, ttft)
        latencies = found.summary.latencies | {"tpot": dict.fromkeys(found.summary.latencies["ttft"], exact(math.nan))}
        return replace(found, summary=replace(found.summary, latencies=latencies))

    plan = made.plan("--slo", "tpot<100ms,ttft<2s")
    assert rank(without_tpot(0.5), plan) > rank(without_tpot(0.6), plan) > rank(without_tpot(math.nan), plan)
