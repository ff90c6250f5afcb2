"""Read a cluster's state from its router's /admin/status and /metrics of the same time. Pure.

Of several routers only one is asked. Its figures about nodes cover all requests, but its figures about requests cover
only its own requests. So the tokens per answer are too high, and the arrivals too low by the same factor. The balancer
uses only the product of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from deploy.metrics_page import OPEN, Page
from deploy.tools.plan.act.balance import DECODE, PREFILL, ClusterLook, NodeLook, Totals
from shared.core.states import FinishReason, NodeState, RowState

ENDED = "baton_requests_total"
ITL = "baton_itl_seconds"
ANSWERED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


def look_at(status: Mapping[str, Any], page: Page, at: float) -> ClusterLook:
    rows: Sequence[Mapping[str, Any]] = status["nodes"]
    decodes = [row for row in rows if row["role"] == DECODE]
    waiting_tokens = sum(max(row["open_prompt_tokens"], row["waiting_tokens"]) for row in rows)
    num_open = page.total(OPEN)
    ended = sum(one.value for one in page.samples if one.name == ENDED and one.labels.get("outcome") in ANSWERED)
    running = sum(row["rows"].get(RowState.RUNNING, 0) for row in decodes)
    return ClusterLook(
        at=at,
        nodes=tuple(map(look_at_node, rows)),
        totals=Totals(
            arrived=ended + num_open,
            ended=ended,
            prompt_tokens=page.total("baton_prompt_tokens_total") + waiting_tokens,
            output_tokens=page.total("baton_output_tokens_total"),
            gaps=page.total(f"{ITL}_count"),
            gaps_s=page.total(f"{ITL}_sum"),
        ),
        token_s=token_seconds(rows),
        waiting_tokens=waiting_tokens,
        not_decoding=max(0.0, num_open - running),
        rows=sum(sum(row["rows"].values()) for row in decodes) / max(1, len(decodes)),
    )


def look_at_node(row: Mapping[str, Any]) -> NodeLook:
    return NodeLook(row["node"], row["role"], NodeState(row["state"]), row["epoch"], row["open_sequences"])


def token_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds per prompt token on a prefill node, or else on any node; 0.0 if unmeasured."""
    rates = [(row["role"], row["prompt_tokens_per_s"]) for row in rows if row["prompt_tokens_per_s"]]
    measured = [rate for role, rate in rates if role == PREFILL] or [rate for _, rate in rates]
    return 1.0 / median(measured) if measured else 0.0
