"""Lead a fleet from outside: the holder of the lease decides the number of nodes. Pure.

  free --take--> led ---(renewed by each call)---> led --release, or LEASE_S without a call--> free.

Without a leader the fleet's own rules decide (own_rules.py), so a leader may end at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared.config.settings.ray_settings import ScalingConfig

LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class LeadOrder:
    """A leader's call. `grow`: the role that gets a node. `give`: the node to stop. Without either, the call only
    renews the lease."""

    leader: str
    grow: str = ""
    give: str = ""


@dataclass(frozen=True, slots=True)
class FleetView:
    """`nodes`: names of nodes that should serve. `extra`: nodes that may leave. `may_grow`: roles that may get a node.

    `is_steady`: no node is starting or leaving.
    """

    nodes: tuple[str, ...]
    extra: tuple[str, ...]
    may_grow: tuple[str, ...]
    is_steady: bool
    scaling: ScalingConfig


class FleetLead(Protocol):
    """A leader's calls, which raise ConfigError if the fleet does not answer."""

    def look(self) -> FleetView:
        """Return the view without taking the lease."""
        ...

    def lead(self, grow: str = "", give: str = "") -> FleetView | None:
        """Take or renew the lease, and pass an order on. Return None while another caller leads."""
        ...

    def release(self) -> None: ...


@dataclass(slots=True)
class Lease:
    _holder: str = ""
    _until: float = -float("inf")

    def take_lease(self, holder: str, now: float) -> bool:
        """Return False while another leader holds the lease."""
        if self.is_held(now) and holder != self._holder:
            return False
        self._holder, self._until = holder, now + LEASE_S
        return True

    def release(self, holder: str) -> None:
        if holder == self._holder:
            self._until = -float("inf")

    def is_held(self, now: float) -> bool:
        return now < self._until
