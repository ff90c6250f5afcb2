"""Forecast a layout under a load, by one virtual run that is judged like a measured run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import Profile
from deploy.tools.plan.sim_cluster import SimCluster
from deploy.tools.plan.tokens import SimTokens
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.figures.summary import Summary, summarize
from deploy.tools.traffic.load_plan import LoadPlan
from shared.core.errors import ConfigError

Passes = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Forecast:
    """`busy`: by role, the share of time in which nodes compute."""

    layout: ClusterLayout
    summary: Summary
    busy: dict[str, float]

    @property
    def share(self) -> float:
        return self.summary.slo_share.value

    @property
    def goodput(self) -> float:
        return self.summary.goodput.value


def play_virtual(
    layout: ClusterLayout, profile: Profile, tokens: SimTokens, plan: LoadPlan, passes: Passes = lambda now: None
) -> tuple[list[RequestRecord], SimCluster]:
    world = SimCluster(layout, profile, tokens)
    driver = plan.load.driver([], plan.truth.every)
    return world.play(driver, plan.load.duration_s + plan.drain_s, passes), world


def forecast(
    layout: ClusterLayout, profile: Profile, tokens: SimTokens, plan: LoadPlan, passes: Passes = lambda now: None
) -> Forecast:
    """Raise ConfigError if no request can be judged."""
    records, world = play_virtual(layout, profile, tokens, plan, passes)
    summary = summarize(records, plan.window(records), plan.slo, plan.reader, plan.load.seed)
    if math.isnan(summary.slo_share.value):
        raise ConfigError(
            f"{len(records)} requests were sent, but none in the judged time; a longer --duration, a higher --rate or "
            "a shorter --warmup is needed"
        )
    return Forecast(layout, summary, busy_shares(world))


def busy_shares(world: SimCluster) -> dict[str, float]:
    by_role: dict[str, list[float]] = {}
    for node in world.nodes:
        by_role.setdefault(node.node.role, []).append(node.timed.busy_seconds / world.now)
    return {role: statistics.fmean(shares) for role, shares in by_role.items()}


def rank(forecast: Forecast, plan: LoadPlan) -> tuple[float, float]:
    """Return a sort key, greater if better: the share within the SLO, then the worst p99's distance from its bound."""
    latencies, slo = forecast.summary.latencies, plan.slo
    bounds: Sequence[tuple[str, float]] = (("ttft", slo.ttft), ("tpot", slo.tpot), ("itl", slo.itl), ("e2e", slo.e2e))
    used = [latencies[name]["p99"].value / bound for name, bound in bounds if bound < math.inf]
    known = [one for one in used if not math.isnan(one)]  # answers of one token have no TPOT
    return round(forecast.share, 2), -max(known, default=math.inf if used else 0.0)
