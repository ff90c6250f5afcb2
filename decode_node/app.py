"""The decode daemon. Heavy modules load after the plan of CPU cores is applied."""

from __future__ import annotations

from shared.config import core_plan
from shared.config.processes import NodeProcessConfig


def run(config: NodeProcessConfig) -> int:
    """Serve until a signal arrives. Return the exit code."""
    core_plan.apply(core_plan.of_node(config.cores, config.parts.parallel))
    from decode_node.side import DecodeSide
    from shared.node.loop.context import NodeContext
    from shared.node.run import run_node
    from shared.transfer.transports import make_receiver

    def make_side(ctx: NodeContext) -> DecodeSide:
        return DecodeSide(ctx, {name: make_receiver(name, ctx.core.pool) for name in ctx.facts.transports})

    return run_node(config, make_side)
