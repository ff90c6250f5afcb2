"""Run a `Sizer`: lead a fleet, pass wishes on, and report."""

from __future__ import annotations

from collections.abc import Callable

from deploy.ray.lead import FleetLead
from deploy.tools.plan.act.balance import ClusterLook, Demand, RoleMove
from deploy.tools.plan.act.size import Sizer, Wish
from shared.core.errors import ConfigError


class Sizing:
    """`is_dry`: only report, and do not lead."""

    def __init__(self, fleet: FleetLead, sizer: Sizer, say: Callable[[str], None], *, is_dry: bool = False) -> None:
        self._fleet = fleet
        self._sizer = sizer
        self._say = say
        self._is_dry = is_dry
        self._trouble = ""

    def turn(self, look: ClusterLook, demand: Demand | None) -> RoleMove | None:
        """Renew the lease, and decide once. Return a move that the caller must order, or None.

        If the fleet does not answer, or another caller leads, the next turn asks again.
        """
        move, trouble = None, ""
        try:
            view = self._fleet.look() if self._is_dry else self._fleet.lead()
            if view is None:
                trouble = "another `baton plan act` decides the number of nodes; waiting for its end"
            else:
                move = self._pass_on(self._sizer.see(look, demand, view))
        except ConfigError as error:
            trouble = error.message
        if trouble:
            self._sizer.restart()
        if trouble and trouble != self._trouble:
            self._say(trouble)
        self._trouble = trouble
        return move

    def _pass_on(self, wish: Wish | None) -> RoleMove | None:
        if wish is None or wish.move is not None:
            return wish.move if wish is not None else None
        self._say(text_of(wish) + (" (dry run)" if self._is_dry else ""))
        if not self._is_dry:
            self._fleet.lead(wish.grow, wish.give)
        return None

    def end(self) -> None:
        if self._is_dry:
            return
        try:
            self._fleet.release()
        except ConfigError as error:
            self._say(error.message)


def text_of(wish: Wish) -> str:
    if wish.grow:
        return f"asks Ray for one more node, {wish.grow}: {wish.why}"
    return f"gives {wish.give} back to Ray: {wish.why}"
