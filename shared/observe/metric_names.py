"""The metrics there are, as data: what nodes may report and under which name the router shows it.

A node sends `counters` (totals since its epoch began) and `observations` (samples since the last heartbeat) by the
short names below; anything else is dropped, so a peer can't make up metrics or labels.
"""

from __future__ import annotations

from shared.core.states import QueueStage

# short name -> (metric, help)
NODE_COUNTERS: dict[str, tuple[str, str]] = {
    "steps": ("baton_steps_total", "Steps launched"),
    "graph_steps": ("baton_graph_steps_total", "Of these, run as CUDA graphs"),
    "device_idle_seconds": ("baton_device_idle_seconds_total", "Time the device had no step while requests ran"),
    "spec_accepted_tokens": ("baton_spec_accepted_tokens_total", "Accepted drafts, without the bonus token"),
    "spec_rows_without_draft_state": (
        "baton_spec_rows_without_draft_state_total",
        "Requests from prefill nodes without a draft head: their drafts know nothing of the prompt",
    ),
    "spec_steps": ("baton_spec_steps_total", "Verifies, one per request and step"),
    "spec_draft_seconds": ("baton_spec_draft_seconds_total", "Device time of drafting and of keeping draft state"),
    "spec_verify_seconds": (
        "baton_spec_verify_seconds_total",
        "Device time of the rest of steps with drafts",
    ),
    "wire_errors": ("baton_wire_errors_total", "Messages dropped as malformed, unknown or of an old epoch"),
    "retractions": ("baton_retractions_total", "Requests that gave their memory back and were prefilled again"),
    "failed_steps": ("baton_failed_steps_total", "Steps that raised"),
    "prompt_tokens": ("baton_prompt_tokens_total", "Prompt tokens computed"),
    "prompt_steps": ("baton_prompt_steps_total", "Steps that computed prompt tokens, when they have ended"),
    "prompt_step_tokens": ("baton_prompt_step_tokens_total", "Prompt tokens of these steps"),
    "prompt_step_seconds": (
        "baton_prompt_step_seconds_total",
        "Time of these steps, each from its launch or the end of the one before it",
    ),
    "mixed_steps": ("baton_mixed_steps_total", "Steps of running requests that computed prompts too"),
    "mixed_prompt_tokens": (
        "baton_mixed_prompt_tokens_total",
        "Prompt tokens of those steps; by their number: the chunk that --itl-budget or --mixed-chunk-size gives",
    ),
    "cached_prompt_tokens": ("baton_cached_prompt_tokens_total", "Prompt tokens the prefix cache gave"),
    "offloaded_pages": ("baton_offloaded_pages_total", "KV pages copied from the pool to host memory"),
    "restored_pages": ("baton_restored_pages_total", "KV pages copied back from host memory or its file"),
    "readmissions": (
        "baton_readmissions_total",
        "Retracted requests that went on without prefilling again, with their KV copied back",
    ),
    "offload_failures": (
        "baton_offload_failures_total",
        "Requests whose KV came back otherwise than it was stored, and was computed instead",
    ),
    "output_tokens": ("baton_output_tokens_total", "Tokens sampled and kept"),
    "handoffs": ("baton_handoffs_total", "Requests installed from another node"),
    "unreachable": (
        "baton_unreachable_total",
        "Hand-offs given up because the other node could not be reached, or not any more",
    ),
    "handoff_bytes": ("baton_handoff_bytes_total", "KV bytes pulled from other nodes"),
}

# Who was not let in, or not listened to. As counters: refused.<reason>
REFUSED_METRIC = (
    "baton_refused_total",
    "Connections with no or a foreign key (key), names bound to another key (identity), older lives of a node (epoch), "
    "offers without a router's ticket (ticket), connections with too much unread (flood), silent or too many (idle)",
)
REFUSED_PREFIX = "refused."
REFUSED_KEY, REFUSED_IDENTITY, REFUSED_EPOCH, REFUSED_TICKET = "key", "identity", "epoch", "ticket"
REFUSED_FLOOD, REFUSED_IDLE = "flood", "idle"
REFUSED_REASONS = (REFUSED_KEY, REFUSED_IDENTITY, REFUSED_EPOCH, REFUSED_TICKET, REFUSED_FLOOD, REFUSED_IDLE)
REFUSED_COUNTERS = tuple(f"{REFUSED_PREFIX}{reason}" for reason in REFUSED_REASONS)

SPEC_DEPTH_METRIC = ("baton_spec_accepted_at_total", "Accepted drafts by their depth in the window, from 1 on")
SPEC_DEPTH_PREFIX = "spec_accepted_at."  # spec_accepted_at.<depth>
SPEC_DEPTH_COUNTERS = tuple(f"{SPEC_DEPTH_PREFIX}{depth}" for depth in range(1, 16))

# Steps of a node with graphs that none could run. As counters: eager.<reason>
EAGER_REASONS = {
    "prompts": "with prompts in them",
    "grammars": "with a grammar",
    "edits": "with penalties, bias, bad words, allowed or early stop tokens",
    "logprobs": "with log-probabilities",
    "adapters": "with adapters",
    "rows": "with more requests than the largest graph",
    "width": "with windows of a width that has no graph",
    "length": "with longer texts than graphs read",
    "uncaptured": "of a size whose capture failed",
}
EAGER_METRIC = (
    "baton_eager_steps_total",
    "Steps without a graph on a node that has some: "
    + "; ".join(f"{why} ({name})" for name, why in EAGER_REASONS.items()),
)
EAGER_PREFIX = "eager."
EAGER_COUNTERS = tuple(f"{EAGER_PREFIX}{reason}" for reason in EAGER_REASONS)

# short name -> (metric, help); all in seconds
NODE_HISTOGRAMS: dict[str, tuple[str, str]] = {
    "step_seconds": ("baton_step_seconds", "From launch of a step to its result on the host"),
    "handoff_seconds": ("baton_handoff_seconds", "From the last chunk of a prompt to its installation"),
    "handoff_cost_seconds": (
        "baton_handoff_cost_seconds",
        "From the last chunk of a prompt, or its grant where that came later, to word of its installation",
    ),
    "handoff_tail_seconds": (
        "baton_handoff_tail_seconds",
        "From the arrival of a prompt's record to its installation: what computing has not hidden of the transfer",
    ),
    "time_to_free_seconds": ("baton_time_to_free_seconds", "From the end of a request to its pages being free"),
}

QUEUE_METRIC = ("baton_queue_seconds", "Time a request spent in one queue")
QUEUE_PREFIX = "queue_seconds."  # queue_seconds.<stage>
QUEUE_STAGES = tuple(QueueStage)

LATENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 0.75,
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
