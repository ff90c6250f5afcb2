"""Manage a node's CPU cores, and borrow idle cores from other nodes on the machine."""

from __future__ import annotations

import time

from shared.config import core_plan
from shared.config.core_plan import CorePlan
from shared.config.settings.settings import ParallelConfig
from shared.kernel.team.core_table import CoreTable, NoTable, Owner
from shared.kernel.team.team import Team
from shared.model.math.interface import Model
from shared.observe.log import Logger

CLEAR_UP_S = 1.0
MAX_DESCRIPTION = 1000  # limit on a description, in characters
NO_CPUS = "it was given no --cpus"
NO_BORROW = "it was given no --borrow"
FEW_THREADS = "it was given fewer --threads than cores"
IN_STEP = "its ranks or stages compute in step"
NO_PROGRAM = "its model is not one compiled program"


class NodeCores:
    """Owns the team of compute threads, and the node's entry in the machine's table of cores.

    `why_fixed`: why the node neither borrows nor lends; empty if it may do both.
    """

    def __init__(self, plan: CorePlan, parallel: ParallelConfig, node: str) -> None:
        self.threads = core_plan.num_threads(core_plan.of_node(plan, parallel))
        self._plan, self._node = plan, node
        self._in_step = parallel.num_ranks > 1 or parallel.pp > 1
        self._table: CoreTable | None = None
        self._cleared_at, self._computes = 0.0, False
        self.team, self.why_fixed = Team(self.threads), ""

    def take_cores(self, device: str, log: Logger) -> None:
        """Join the table of cores. Call this before the model is loaded. torch keeps its own threads."""
        self._computes = device == "cpu"
        if not self._computes:
            return
        why = self._why_not()
        try:
            if self._plan.cpus:
                self._table = CoreTable(Owner(self._node, self._plan.cpus, () if why else self._plan.borrow))
            if self._table is not None and not why:
                self.team = self._table.team()
        except NoTable as error:
            why = why or str(error)
        if why:
            self._fix(why, log)

    def _why_not(self) -> str:
        reasons = (
            (not self._plan.cpus, NO_CPUS),
            (self._in_step, IN_STEP),
            (self.threads < len(self._plan.cpus), FEW_THREADS),
            (not self._plan.borrow, NO_BORROW),
        )
        return next((why for is_so, why in reasons if is_so), "")

    def settle(self, model: Model, log: Logger) -> None:
        """Stop sharing cores unless the model is one compiled program. Call this after the first step.

        Only a compiled program announces its work in pieces so short that a borrower can return a core in time.
        """
        if not self.why_fixed and self._computes and not getattr(model, "is_program", False):
            self._fix(NO_PROGRAM, log)

    def rest(self) -> None:
        """Offer the cores to other nodes until this node's next program."""
        if not self.why_fixed:
            self.team.rest()

    def clear_up(self) -> None:
        """Clean up after killed nodes, which may have held a core."""
        now = time.monotonic()
        if self._table is not None and now - self._cleared_at >= CLEAR_UP_S:
            self._cleared_at = now
            self._table.clear_up()

    def describe_cores(self) -> str:
        own = ",".join(map(str, self._plan.cpus))
        if not self._computes or not own:
            return ""
        if self._table is None or self.why_fixed:
            return f"{own}; it uses only these: {self.why_fixed}"
        lent = [use for use in self._table.uses() if use.core in self._plan.cpus and use.guest is not None]
        parts = [own, *(f"{use.core} is lent to {use.guest}" for use in lent)]
        if borrowed := self._table.borrowed():
            parts.append(f"borrowed: {','.join(map(str, borrowed))}")
        return "; ".join(parts)[:MAX_DESCRIPTION]

    def close(self) -> None:
        self.team.close()
        if self._table is not None:
            self._table.close()

    def _fix(self, why: str, log: Logger) -> None:
        self.why_fixed = why
        self.team.keep_to_own()
        if self._table is not None:
            self._table.hold_own()
        if self._plan.borrow:
            log.info("this node borrows and lends no cores", why=why)
