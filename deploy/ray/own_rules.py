"""Apply the fleet's own rules for the number of nodes, while it has no leader. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.metrics_page import Page
from deploy.ray import launch_plan as plan
from deploy.ray.fleet import Fleet
from deploy.ray.report import DECODE, PREFILL
from deploy.ray.scaling import RoleScaler
from deploy.ray.signals import load_of, serving_of
from shared.config.processes import RayClusterConfig


@dataclass(slots=True)
class OwnRules:
    config: RayClusterConfig
    _scalers: dict[str, RoleScaler] = field(init=False)

    def __post_init__(self) -> None:
        self._scalers = make_scalers(self.config)

    def apply(
        self, fleet: Fleet, before: Sequence[Page], pages: Sequence[Page], now: float, *, is_led: bool
    ) -> list[str]:
        """Add or remove at most one node per role. Return the changes for the log.

        `before` and `pages`: old and new /metrics pages of the same routers. While a leader holds the lease
        (`is_led`), nothing changes, and the scalers' waits begin again.
        """
        serving = serving_of(pages[0]) if pages else {}
        changes = []
        for role, scaler in self._scalers.items():
            load = load_of(role, before, pages, self.config.scaling)
            is_known = load is not None and not is_led and fleet.is_steady(role, serving)
            step = scaler.decide(now, load if is_known else None)
            newest = fleet.newest(role, serving)
            if step > 0 and fleet.may_grow(role, scaler.most):
                fleet.add_member(fleet.next_name(role), now)
                changes.append(f"{role}: +1 node at {load}")
            elif step < 0 and newest is not None:
                fleet.leave(newest)
                changes.append(f"{role}: {newest} leaves at {load}")
        return changes


def make_scalers(config: RayClusterConfig) -> dict[str, RoleScaler]:
    at_start = {PREFILL: config.ray.prefill, DECODE: config.ray.decode}
    limits = {role: (least, plan.most(config, role)) for role, least in at_start.items()}
    return {role: RoleScaler(least, most, config.scaling) for role, (least, most) in limits.items() if most > least}
