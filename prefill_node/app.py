"""The prefill daemon. Heavy modules load after the plan of CPU cores is applied."""

from __future__ import annotations

from shared.config import core_plan
from shared.config.processes import NodeProcessConfig


def run(config: NodeProcessConfig) -> int:
    """Serve until a signal arrives. Return the exit code."""
    core_plan.apply(core_plan.of_node(config.cores, config.parts.parallel))
    from prefill_node.pulls import TRANSPORTS
    from prefill_node.side import PrefillSide
    from shared.node.loop.context import NodeContext
    from shared.node.run import run_node
    from shared.transfer.transports import make_receiver, make_sender

    def make_side(ctx: NodeContext) -> PrefillSide:
        pool, names = ctx.core.pool, ctx.facts.transports
        receivers = {name: make_receiver(name, pool) for name in names if name in TRANSPORTS}
        return PrefillSide(ctx, {name: make_sender(name, pool) for name in names}, receivers)

    return run_node(config, make_side)
