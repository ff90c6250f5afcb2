"""Decide when a cluster gets one more node, or gives one back. Pure.

The planner's README.md has the rules. Nodes that were there at the start are never given back. The waiting times
up_after_s and down_after_s begin after a whole window with the same nodes: only then is the demand known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.ray.lead import FleetView
from deploy.ray.scaling import SPARE, Patience
from deploy.tools.plan.act.balance import DECODE, OTHER, PREFILL, ClusterLook, Demand, NodeLook, RoleMove
from shared.config.settings.ray_settings import ScalingConfig


@dataclass(frozen=True, slots=True)
class Wish:
    """A wish to change the fleet, in one of three fields. `grow`: add a node in this role.

    `give`: give back this node. `move`: order this change of role first, so that a node can leave later.
    """

    why: str
    grow: str = ""
    give: str = ""
    move: RoleMove | None = None


@dataclass(slots=True)
class Sizer:
    """`window_s`: the length of the balancer's window. `least`: the fewest nodes of each role."""

    scaling: ScalingConfig
    window_s: float
    least: int
    _patience: Patience = field(init=False)
    _names: frozenset[str] = frozenset()
    _same_since: float = 0.0

    def __post_init__(self) -> None:
        self._patience = Patience(self.scaling)
        self.least = max(1, self.least)

    def restart(self) -> None:
        self._patience.restart()

    def see(self, look: ClusterLook, demand: Demand | None, view: FleetView) -> Wish | None:
        """Return a wish; None if the fleet should stay as it is. `demand` is None if unknown, or during moves."""
        prefills, decodes = look.of(PREFILL), look.of(DECODE)
        is_known = self._is_settled(look.at, {node.name for node in (*prefills, *decodes)}, view)
        if demand is None or not is_known or not prefills or not decodes:
            self.restart()
            return None
        less = self._less(look, demand, view)
        step = self._patience.step(
            look.at,
            is_full=demand.exceeds(len(prefills) + len(decodes), self.least),
            is_spare=less is not None,
            may_grow=bool(view.may_grow),
            may_shrink=True,
        )
        if step > 0:
            return Wish(str(demand), grow=short_role(demand, len(prefills), len(decodes), view))
        return less if step < 0 else None

    def _is_settled(self, now: float, ready: set[str], view: FleetView) -> bool:
        if ready != self._names:
            self._names, self._same_since = frozenset(ready), now
        return view.is_steady and set(view.nodes) <= ready and now - self._same_since >= self.window_s

    def _less(self, look: ClusterLook, demand: Demand, view: FleetView) -> Wish | None:
        """Return the wish for one node less; None if the other nodes have no room for the node's work."""
        roomy = [role for role in (PREFILL, DECODE) if self._has_room_without(look, demand, role)]
        for role in roomy:
            later = [node for node in look.of(role) if node.name in view.extra]
            if later:
                return Wish(str(demand), give=idlest(later).name)
        for role in roomy:
            if any(node.name in view.extra for node in look.of(OTHER[role])):
                node = idlest(look.of(role))
                return Wish(
                    str(demand), move=RoleMove(node.name, OTHER[role], node.epoch, f"another can leave: {demand}")
                )
        return None

    def _has_room_without(self, look: ClusterLook, demand: Demand, role: str) -> bool:
        rest = {one: len(look.of(one)) - (one == role) for one in (PREFILL, DECODE)}
        return rest[role] >= self.least and demand.pressure(rest[PREFILL], rest[DECODE]) < SPARE


def idlest(nodes: Sequence[NodeLook]) -> NodeLook:
    return min(nodes, key=lambda node: (node.streams, node.name))


def short_role(demand: Demand, num_prefill: int, num_decode: int, view: FleetView) -> str:
    """Return the role that lacks nodes. If this role is at its maximum, return the other role: later the balancer moves
    a node over."""
    more_prefill = demand.pressure(num_prefill + 1, num_decode)
    role = PREFILL if more_prefill < demand.pressure(num_prefill, num_decode + 1) else DECODE
    return role if role in view.may_grow else OTHER[role]
