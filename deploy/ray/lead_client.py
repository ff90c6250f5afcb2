"""Lead a running fleet through its manager, for `baton plan act --ray`."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.ray.actors import find_actor
from deploy.ray.lead import FleetView, LeadOrder
from deploy.ray.manager import MANAGER
from deploy.ray.session import chosen, connected
from shared.config.processes import RayClusterConfig
from shared.core.errors import ConfigError

ANSWERS_WITHIN_S = 10.0


class RayLead:
    def __init__(self) -> None:
        self._leader = secrets.token_hex(8)

    def look(self) -> FleetView:
        found: FleetView = ask_manager("view")
        return found

    def lead(self, grow: str = "", give: str = "") -> FleetView | None:
        found: FleetView | None = ask_manager("lead", LeadOrder(self._leader, grow, give))
        return found

    def release(self) -> None:
        ask_manager("release", self._leader)


def ask_manager(method: str, *arguments: object) -> Any:
    """Call the manager. Raise ConfigError if the manager is missing or does not answer in time."""
    try:
        manager = find_actor(MANAGER)
        if manager is None:
            raise ConfigError("the Ray cluster has no manager of nodes now")
        return ray.get(getattr(manager, method).remote(*arguments), timeout=ANSWERS_WITHIN_S)
    except RayError as error:
        raise ConfigError(f"the manager of nodes on Ray does not answer: {error}") from None


@contextlib.contextmanager
def fleet_of(config: RayClusterConfig) -> Iterator[RayLead]:
    record = chosen(config.ray.address, config.ray.cluster)
    with connected(record.address, record.cluster):
        yield RayLead()
