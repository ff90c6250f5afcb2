"""`baton plan act` in virtual time: the production scheduler and placement, nodes whose steps take known times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.layouts.plan_act import Phase, shifting_trace
from deploy.tools.plan.act.balance import DECODE, PREFILL, Balancer, BalanceSettings
from deploy.tools.plan.simulate import play_virtual
from deploy.tools.traffic.load_plan import LoadPlan
from tests.support.worlds import plan_cases as made
from tests.support.worlds.acting_cluster import ActingCluster

SETTINGS = BalanceSettings(tpot_s=0.05, window_s=10.0)


def load_of(tmp_path: Path, phases: list[Phase]) -> LoadPlan:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in shifting_trace(phases, seed=5)))
    return made.plan("--trace", str(path), "--slo", "ttft<2s,tpot<50ms")


@pytest.mark.long
def test_under_a_shifting_load_it_beats_every_fixed_split(tmp_path: Path) -> None:
    """Four nodes; long prompts first, then long answers: each is too much for two of them."""
    plan = load_of(tmp_path, [Phase(120.0, 3.0, 120, 20), Phase(120.0, 7.5, 8, 200)])
    profile, tokens = made.profile(num_pages=2000), made.tokens()
    shares = []
    for prefill in (1, 2, 3):
        records, _ = play_virtual(made.layout(prefill, 4 - prefill), profile, tokens, plan)
        shares.append(sum(map(plan.slo.is_met, records)) / len(records))
    cluster = ActingCluster(made.layout(2, 2), profile, tokens, Balancer(SETTINGS), restart_s=5.0)
    driver = plan.load.driver([], plan.truth.every)
    records = cluster.play(driver, plan.load.duration_s + plan.drain_s)
    share = sum(map(plan.slo.is_met, records)) / len(records)
    assert all(record.is_whole for record in records), [record.error for record in records if record.error]
    assert share >= 1.2 * max(shares), (share, shares)
    assert {move.role for _, move in cluster.moves} == {PREFILL, DECODE}
    for node in cluster.nodes:
        node.timed.scheduler.queues.budget.kv.check_integrity(idle=True)
