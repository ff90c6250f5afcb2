"""The metrics that nodes may report, and the router's names for them.

A node sends `counters` (totals since its epoch began) and `observations` (samples since the last heartbeat) by these
short names. The router drops other names, so a peer can't invent metrics or labels.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.core.states import QueueStage

# field of NodeReport -> (metric, help)
NODE_GAUGES: dict[str, tuple[str, str]] = {
    "pages_total": ("baton_kv_pool_pages", "KV pages of the node"),
    "waiting": ("baton_waiting_requests", "Requests that wait for memory"),
    "spec_width": ("baton_spec_width", "Tokens per step of a running row now: drafts + 1"),
    "kept_pages": (
        "baton_kv_kept_pages",
        "Free or cached KV pages that new requests don't get, because answers under way will need them "
        "(--growth-reserve)",
    ),
    "missing_routers": ("baton_missing_routers", "Routers on the node's list where it is not registered"),
    "slowness": (
        "baton_node_slowness",
        "Time of the node's steps divided by its peers' time for the same work; 1 if not known",
    ),
}

# short name -> (metric, help)
NODE_COUNTERS: dict[str, tuple[str, str]] = {
    "steps": ("baton_steps_total", "Steps launched"),
    "graph_steps": ("baton_graph_steps_total", "Steps that ran as CUDA graphs"),
    "graph_prompt_steps": (
        "baton_graph_prompt_steps_total",
        "Steps of prompts, without running requests, that ran as CUDA graphs; baton_graph_steps_total counts them too",
    ),
    "device_idle_seconds": ("baton_device_idle_seconds_total", "Time the device had no step while requests ran"),
    "spec_accepted_tokens": ("baton_spec_accepted_tokens_total", "Accepted drafts, without the bonus token"),
    "spec_rows_without_draft_state": (
        "baton_spec_rows_without_draft_state_total",
        "Requests from prefill nodes without a draft head, whose drafts don't know the prompt",
    ),
    "spec_steps": ("baton_spec_steps_total", "Verifies, one per request and step"),
    "spec_draft_seconds": ("baton_spec_draft_seconds_total", "Device time of drafting and of keeping draft state"),
    "spec_verify_seconds": (
        "baton_spec_verify_seconds_total",
        "Device time of steps with drafts, except drafting and keeping draft state",
    ),
    "wire_errors": ("baton_wire_errors_total", "Messages dropped as malformed, unknown or of an old epoch"),
    "retractions": ("baton_retractions_total", "Requests that released their memory and were prefilled again"),
    "outgrown_contexts": (
        "baton_outgrown_contexts_total",
        "Those of baton_retractions_total whose text grew beyond the model's short context (longrope)",
    ),
    "failed_steps": ("baton_failed_steps_total", "Steps that raised"),
    "prompt_tokens": ("baton_prompt_tokens_total", "Prompt tokens computed"),
    "prompt_steps": ("baton_prompt_steps_total", "Steps that computed prompt tokens, when they have ended"),
    "prompt_step_tokens": ("baton_prompt_step_tokens_total", "Prompt tokens of baton_prompt_steps_total's steps"),
    "prompt_step_seconds": (
        "baton_prompt_step_seconds_total",
        "Time of baton_prompt_steps_total's steps, each from its launch or the end of the previous step",
    ),
    "mixed_steps": ("baton_mixed_steps_total", "Steps of running requests that computed prompts too"),
    "mixed_prompt_tokens": (
        "baton_mixed_prompt_tokens_total",
        "Prompt tokens of baton_mixed_steps_total's steps; divided by the number of these steps, the chunk size that "
        "--itl-budget or --mixed-chunk-size gives",
    ),
    "cached_prompt_tokens": ("baton_cached_prompt_tokens_total", "Prompt tokens found in the prefix cache"),
    "kept_prefix_tokens": (
        "baton_kept_prefix_tokens_total",
        "Tokens of cached pages that were used again, and would have been evicted if their conversation had not been "
        "expected back",
    ),
    "offloaded_pages": ("baton_offloaded_pages_total", "KV pages copied from the pool to host memory"),
    "restored_pages": ("baton_restored_pages_total", "KV pages copied back from host memory or its file"),
    "readmissions": (
        "baton_readmissions_total",
        "Retracted requests that continued with their KV copied back, without prefilling again",
    ),
    "offload_failures": (
        "baton_offload_failures_total",
        "Requests whose KV differed from the stored KV when copied back, and was computed instead",
    ),
    "output_tokens": ("baton_output_tokens_total", "Tokens sampled and kept"),
    "handoffs": ("baton_handoffs_total", "Requests installed from another node"),
    "unreachable": (
        "baton_unreachable_total",
        "Hand-offs ended because the other node could not be reached, or was no longer reachable",
    ),
    "router_list_changes": ("baton_router_list_changes_total", "Routers added to the node's list, or removed from it"),
    "handoff_bytes": ("baton_handoff_bytes_total", "KV bytes pulled from other nodes"),
    "pulled_pages": ("baton_pulled_prefix_pages_total", "Cached KV pages copied from other prefill nodes"),
    "pulled_tokens": ("baton_pulled_prefix_tokens_total", "Prompt tokens of pages copied from other prefill nodes"),
    "pull_seconds": (
        "baton_prefix_pull_seconds_total",
        "Time that prompts waited for other prefill nodes' pages, in vain or not; without ended requests "
        "and lost sources",
    ),
    "loans": ("baton_prefix_loans_total", "Times that cached pages were pinned for another prefill node"),
    "loans_refused": ("baton_prefix_loans_refused_total", "Times that another prefill node asked for pages in vain"),
    "loans_gave_way": (
        "baton_prefix_loans_gave_way_total",
        "Loans that ended because this node's requests needed the memory",
    ),
    "loans_expired": ("baton_prefix_loans_expired_total", "Loans that the other node did not end in time"),
}

# Ways in which pulls of prefixes end. Counters: pull.<outcome>
PULL_OUTCOMES = {
    "pulled": "copied",
    "refused": "the other node refused",
    "late": "computing was faster by then",
    "failed": "the pages or their description were wrong",
    "lost": "the other node was lost",
    "no_memory": "there was no room for the pages",
    "gave_way": "others needed the memory",
    "ended": "the request ended first",
    "cached_here": "the node had the pages already",
    "under_way": "the node was getting or computing them for another prompt",
    "not_asked": "the other node was late or lost a moment ago, or too many pulls were open",
}
PULL_PREFIX = "pull."

# Reasons to refuse or ignore peers. Counters: refused.<reason>
REFUSED_PREFIX = "refused."
REFUSED_KEY, REFUSED_IDENTITY, REFUSED_EPOCH, REFUSED_TICKET = "key", "identity", "epoch", "ticket"
REFUSED_FLOOD, REFUSED_IDLE = "flood", "idle"
REFUSED_REASONS = (REFUSED_KEY, REFUSED_IDENTITY, REFUSED_EPOCH, REFUSED_TICKET, REFUSED_FLOOD, REFUSED_IDLE)

SPEC_DEPTH_PREFIX = "spec_accepted_at."  # spec_accepted_at.<depth>

# Reasons why no graph could run a step. Counters: eager.<reason>
EAGER_REASONS = {
    "mixed": "with prompts and running requests together",
    "prompts": "with prompts, on a node that has no graphs of them",
    "tokens": "with more prompt tokens than the largest graph",
    "scores": "with log-probabilities of more than 8 prompt tokens",
    "rows": "with more requests than the largest graph",
    "width": "with windows of a width that has no graph, as all have on a prefill node",
    "length": "with longer texts than graphs read",
    "uncaptured": "of a size whose capture failed",
    "waits": "of a model that waits for the host in every step",
}
EAGER_PREFIX = "eager."


class Family(NamedTuple):
    """Counters with one name on the page. A counter's short name is the prefix and the label's value."""

    prefix: str
    label: str
    values: tuple[str, ...]
    metric: str
    help: str


def explained(reasons: dict[str, str]) -> str:
    return "; ".join(f"{why} ({name})" for name, why in reasons.items())


FAMILIES = (
    Family(
        SPEC_DEPTH_PREFIX, "position", tuple(map(str, range(1, 16))),
        "baton_spec_accepted_at_total", "Accepted drafts by their depth in the window, from 1 on",
    ),
    Family(
        REFUSED_PREFIX, "reason", REFUSED_REASONS, "baton_refused_total",
        "Connections with no or a foreign key (key), names bound to another key (identity), older epochs (epoch), "
        "offers without a router's ticket (ticket), connections with too much unread (flood), silent or too many "
        "(idle)",
    ),
    Family(
        PULL_PREFIX, "outcome", tuple(PULL_OUTCOMES), "baton_prefix_pulls_total",
        f"Prompts whose cached pages the router knew at another prefill node: {explained(PULL_OUTCOMES)}",
    ),
    Family(
        EAGER_PREFIX, "reason", tuple(EAGER_REASONS), "baton_eager_steps_total",
        f"Steps without a graph on a node that has some: {explained(EAGER_REASONS)}",
    ),
)  # fmt: skip

# short name -> (metric, help); all in seconds
NODE_HISTOGRAMS: dict[str, tuple[str, str]] = {
    "step_seconds": ("baton_step_seconds", "From launch of a step to its result on the host"),
    "handoff_seconds": ("baton_handoff_seconds", "From the last chunk of a prompt to its installation"),
    "handoff_cost_seconds": (
        "baton_handoff_cost_seconds",
        "From the last chunk of a prompt, or its grant if that came later, to the news of its installation",
    ),
    "handoff_tail_seconds": (
        "baton_handoff_tail_seconds",
        "From the arrival of a prompt's record to its installation: the part of the transfer after computing",
    ),
    "time_to_free_seconds": ("baton_time_to_free_seconds", "From the end of a request to its pages being free"),
}

QUEUE_METRIC = ("baton_queue_seconds", "Time a request spent in one queue")
QUEUE_PREFIX = "queue_seconds."  # queue_seconds.<stage>
QUEUE_STAGES = tuple(QueueStage)
ROUTER_STAGE = "router"  # the router's own stage, which no node may report

LATENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 0.75,
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
