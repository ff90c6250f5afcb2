"""`baton plan act --ray` in virtual time: nodes come while no split is enough, and go when the others have room."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from benchmarks.layouts.plan_act import Phase, shifting_trace
from deploy.tools.plan.act.balance import DECODE, PREFILL, Balancer, BalanceSettings
from deploy.tools.plan.act.size import Sizer
from deploy.tools.plan.act.sizing import Sizing
from deploy.tools.traffic.load_plan import LoadPlan
from shared.config.processes import RayClusterConfig
from shared.config.settings.ray_settings import RayConfig, ScalingConfig
from tests.support.worlds import plan_cases as made
from tests.support.worlds.acting_cluster import ActingCluster
from tests.support.worlds.sized_cluster import SizedCluster

SETTINGS = BalanceSettings(tpot_s=0.05, window_s=10.0)
SCALING = ScalingConfig(max_decode=6, up_after_s=10.0, down_after_s=60.0, settle_s=20.0)
START_S = 5.0


def load_of(tmp_path: Path, phases: list[Phase]) -> LoadPlan:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in shifting_trace(phases, seed=5)))
    return made.plan("--trace", str(path), "--slo", "ttft<2s,tpot<50ms")


def test_nodes_come_and_go_with_the_load(tmp_path: Path) -> None:
    """Between small loads come more long prompts than two nodes can do in any split."""
    plan = load_of(tmp_path, [Phase(40.0, 0.5, 60, 20), Phase(200.0, 2.0, 120, 60), Phase(360.0, 0.5, 60, 20)])
    config = RayClusterConfig(ray=RayConfig(prefill=1, decode=1), scaling=SCALING)
    profile, tokens, said = made.profile(num_pages=2000), made.tokens(), list[str]()
    cluster = SizedCluster(config, made.layout(1, 1), profile, tokens, Balancer(SETTINGS), START_S)
    cluster.sizing = Sizing(cluster.port, Sizer(SCALING, SETTINGS.window_s, SETTINGS.least), said.append)
    until = plan.load.duration_s + plan.drain_s
    records = cluster.play(plan.load.driver([], plan.truth.every), until)
    assert all(record.is_whole for record in records), [record.error for record in records if record.error]
    two = ActingCluster(made.layout(1, 1), profile, tokens, Balancer(SETTINGS), START_S)
    without = two.play(plan.load.driver([], plan.truth.every), until)
    good, good_without = (sum(map(plan.slo.is_met, found)) for found in (records, without))
    assert good >= 1.5 * good_without, (good, good_without, said)

    sizes = [2, *(size for _, size in cluster.sizes)]
    steps = [after - before for before, after in pairwise(sizes)]
    assert steps.count(1) >= 2 and steps == sorted(steps, reverse=True), f"once up and once down: {sizes} {said}"
    assert sizes[-1] == 2 and set(cluster.fleet.members) == {"router-0", "prefill-0", "decode-0"}, "all later ones left"
    assert all(at >= 40.0 for at, _ in cluster.sizes), "a small load asks for none"
    assert {node.node.role for node in cluster.nodes if node.node.node_id in cluster.fleet.members} == {PREFILL, DECODE}
