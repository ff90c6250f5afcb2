"""Turn a node's heartbeat into the values of its metrics."""

from __future__ import annotations

from router.fleet.registry import RegisteredNode
from shared.observe.metrics import NodeReport
from shared.wire.messages import Heartbeat


def report_of(node: RegisteredNode, beat: Heartbeat) -> NodeReport:
    load = beat.load
    return NodeReport(
        node=node.node_id,
        role=node.role,
        epoch=beat.epoch,
        pages_total=load.pages_total,
        pages=load.pages,
        rows=load.rows,
        waiting=load.waiting,
        spec_width=load.spec_width,
        counters=load.counters,
        observations=load.observations,
        kept_pages=load.kept_pages,
        missing_routers=len(beat.lacks),
        slowness=node.figures.slowness.times,
    )
