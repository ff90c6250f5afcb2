"""When a role gets a node more, or one less. Pure: takes loads and times, gives +1, 0 or -1.

Pressure is load over what counts as full. Two thresholds and two waits keep it from swinging:

    grow    pressure >= 1, or latency beyond its objective under some load, for up_after_s
    shrink  pressure, reckoned for one node less, < SPARE of full, latency within its objective, for down_after_s

A constant load never makes both true in turn: right after growth, one node less is what was full before. That holds for
growth by latency too, for the pressure at which the objective was missed counts as full from then on, for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.config.ray_settings import ScalingConfig

SPARE = 0.7
SOME_LOAD = 0.25  # below it a missed objective is not for want of nodes
REMEMBERED_S = 3600.0


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Of one role, over all its nodes. `busy`: share of request rows or KV pages in use, the larger; `latency`: over
    its objective, 0 without one or without traffic."""

    nodes: int
    waiting: float
    busy: float
    latency: float


@dataclass(slots=True)
class RoleScaler:
    """Never below `least` nodes, never above `most`, one step at a time."""

    least: int
    most: int
    settings: ScalingConfig
    _full_since: float | None = None
    _spare_since: float | None = None
    _changed_at: float = -float("inf")
    _full_level: float = 1.0
    _level_until: float = field(default=-float("inf"))

    def decide(self, now: float, load: RoleLoad | None) -> int:
        """`load` is None while it says nothing: no figures, or a node of the role is starting or leaving."""
        if load is None or load.nodes == 0:
            self._full_since = self._spare_since = None
            return 0
        self._full_since = self._since(self._full_since, now, self._is_full(load))
        self._spare_since = self._since(self._spare_since, now, self._is_spare(load, now))
        if now - self._changed_at < self.settings.settle_s:
            return 0
        if load.nodes < self.most and self._lasted(self._full_since, now, self.settings.up_after_s):
            self._learn(load, now)
            return self._change(now, 1)
        if load.nodes > self.least and self._lasted(self._spare_since, now, self.settings.down_after_s):
            return self._change(now, -1)
        return 0

    def _is_full(self, load: RoleLoad) -> bool:
        pressure = self.pressure(load, load.nodes)
        return pressure >= 1.0 or (load.latency > 1.0 and pressure >= SOME_LOAD)

    def _is_spare(self, load: RoleLoad, now: float) -> bool:
        """Whether a node less would do, with room."""
        full = self._full_level if now < self._level_until else 1.0
        return load.nodes > 1 and load.latency <= 1.0 and self.pressure(load, load.nodes - 1) < SPARE * full

    def pressure(self, load: RoleLoad, nodes: int) -> float:
        """The same work on so many nodes."""
        busy = load.busy * load.nodes / nodes / self.settings.busy_rows
        return max(busy, load.waiting / nodes / self.settings.busy_waiting)

    def _learn(self, load: RoleLoad, now: float) -> None:
        self._full_level = min(1.0, self.pressure(load, load.nodes))
        self._level_until = now + REMEMBERED_S

    def _change(self, now: float, step: int) -> int:
        self._changed_at = now
        self._full_since = self._spare_since = None
        return step

    @staticmethod
    def _since(since: float | None, now: float, holds: bool) -> float | None:
        return (now if since is None else since) if holds else None

    @staticmethod
    def _lasted(since: float | None, now: float, wanted_s: float) -> bool:
        return since is not None and now - since >= wanted_s
