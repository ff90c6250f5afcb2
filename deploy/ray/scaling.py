"""Decide when a role gains or loses one node. Pure.

Pressure is the load as a share of full load. Two thresholds and two waits prevent oscillation:

  grow    pressure >= 1, or latency beyond its objective and pressure >= SOME_LOAD, for up_after_s
  shrink  pressure with one node fewer would be < SPARE x full, and latency is within its objective, for down_after_s

Under a constant load, a role that has grown does not shrink, because the other nodes would be full again. If latency
made a role grow, the role's pressure at that time counts as full for REMEMBERED_S.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.config.settings.ray_settings import ScalingConfig

SPARE = 0.7
SOME_LOAD = 0.25  # below this pressure, a missed latency objective adds no node
REMEMBERED_S = 3600.0


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The load of all nodes of a role. `busy`: the used share of request rows or of KV pages, whichever is larger.

    `latency`: measured latency divided by its objective; 0 without an objective or traffic.
    """

    nodes: int
    waiting: float
    busy: float
    latency: float


@dataclass(slots=True)
class Patience:
    """Delay a change until its condition has lasted and the last change is `settle_s` ago."""

    settings: ScalingConfig
    _full_since: float | None = None
    _spare_since: float | None = None
    _changed_at: float = -float("inf")

    def restart(self) -> None:
        self._full_since = self._spare_since = None

    def step(self, now: float, *, is_full: bool, is_spare: bool, may_grow: bool, may_shrink: bool) -> int:
        """Return +1, 0 or -1 nodes."""
        self._full_since = since(self._full_since, now, is_full)
        self._spare_since = since(self._spare_since, now, is_spare)
        if now - self._changed_at < self.settings.settle_s:
            return 0
        if may_grow and lasted(self._full_since, now, self.settings.up_after_s):
            return self._change(now, 1)
        if may_shrink and lasted(self._spare_since, now, self.settings.down_after_s):
            return self._change(now, -1)
        return 0

    def _change(self, now: float, step: int) -> int:
        self._changed_at = now
        self.restart()
        return step


def since(begin: float | None, now: float, holds: bool) -> float | None:
    return (now if begin is None else begin) if holds else None


def lasted(begin: float | None, now: float, wanted_s: float) -> bool:
    return begin is not None and now - begin >= wanted_s


@dataclass(slots=True)
class RoleScaler:
    """Keep a role between `least` and `most` nodes, one step at a time."""

    least: int
    most: int
    settings: ScalingConfig
    _patience: Patience = field(init=False)
    _full_level: float = 1.0
    _level_until: float = field(default=-float("inf"))

    def __post_init__(self) -> None:
        self._patience = Patience(self.settings)

    def decide(self, now: float, load: RoleLoad | None) -> int:
        """Return +1, 0 or -1 nodes. `load` is None without figures, or while a node of the role starts or leaves."""
        if load is None or load.nodes == 0:
            self._patience.restart()
            return 0
        step = self._patience.step(
            now,
            is_full=self._is_full(load),
            is_spare=self._is_spare(load, now),
            may_grow=load.nodes < self.most,
            may_shrink=load.nodes > self.least,
        )
        if step > 0:
            self._full_level = min(1.0, self.pressure(load, load.nodes))
            self._level_until = now + REMEMBERED_S
        return step

    def _is_full(self, load: RoleLoad) -> bool:
        pressure = self.pressure(load, load.nodes)
        return pressure >= 1.0 or (load.latency > 1.0 and pressure >= SOME_LOAD)

    def _is_spare(self, load: RoleLoad, now: float) -> bool:
        full = self._full_level if now < self._level_until else 1.0
        return load.nodes > 1 and load.latency <= 1.0 and self.pressure(load, load.nodes - 1) < SPARE * full

    def pressure(self, load: RoleLoad, nodes: int) -> float:
        """Return the pressure that the same work would put on `nodes` nodes."""
        busy = load.busy * load.nodes / nodes / self.settings.busy_rows
        return max(busy, load.waiting / nodes / self.settings.busy_waiting)
