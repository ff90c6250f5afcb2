"""Prebuilt: the request of a complete hand-off joins the running batch without a forward."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.handoff_in import HandoffIn
from shared.core.states import QueueStage
from shared.node.loop.context import NodeContext
from shared.sched.steps.prebuilt import Arrival
from shared.wire.codec import to_wire
from shared.wire.messages import Installed


def process_prebuilt(ctx: NodeContext, complete: Sequence[HandoffIn], now: float) -> None:
    if not complete:
        return
    ctx.core.loop.admit([_arrival(ctx, handoff) for handoff in complete])
    for handoff in complete:
        ctx.metrics.count("handoffs")
        ctx.metrics.count("spec_rows_without_draft_state", int(handoff.request.lacks_draft_state))
        ctx.metrics.observe_queue(QueueStage.PREBUILT, now - handoff.complete_since)
        ctx.metrics.observe("handoff_tail_seconds", now - handoff.record_since)
        ctx.spans.installed(handoff.key, max(handoff.complete_since, handoff.record_since))
        ctx.outbox.send(handoff.source, Installed(to_wire(handoff.key), handoff.lease))


def _arrival(ctx: NodeContext, handoff: HandoffIn) -> Arrival:
    record, req = handoff.record, handoff.request
    assert record is not None
    req.cached_tokens = min(record.cached_tokens, len(req.ask.prompt_ids))
    return Arrival(
        request=req,
        token=record.token,
        committed=record.committed,
        logprobs=tuple(record.logprobs),
        draft_state=handoff.draft_state,
    )
