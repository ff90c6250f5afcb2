"""What engines call their counters of cached prompt tokens and of hand-offs, and reading them. Pure.

Sources of the names: vLLM's `vllm/v1/metrics/loggers.py` and its NIXL connector's `stats.py`; SGLang's
`srt/metrics/collector.py`; Dynamo's `prometheus_names.rs`; llama.cpp's `tools/server`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from deploy.metrics_page import Page


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """An engine's counters. Those in `proved` were seen to move on a real server; other names come from its source."""

    engine: str
    prefix: str  # of all its metrics
    cached: str = ""
    handed_over: str = ""
    proved: frozenset[str] = frozenset()

    def mark(self, name: str) -> str:
        return name if name in self.proved else f"{name} (a name that was never tried)"


VLLM_CACHED = "vllm:prefix_cache_hits_total"
LLAMA_CACHED = "llamacpp:prompt_tokens_cached_total"
BATON_COUNTERS = ("baton_cached_prompt_tokens_total", "baton_handoffs_total")
ENGINES = (
    EngineCounters(
        "Baton",
        "baton_",
        cached=BATON_COUNTERS[0],
        handed_over=BATON_COUNTERS[1],
        proved=frozenset(BATON_COUNTERS),
    ),
    EngineCounters(
        "vLLM",
        "vllm:",
        cached=VLLM_CACHED,
        handed_over="vllm:nixl_bytes_transferred_count",
        proved=frozenset({VLLM_CACHED}),
    ),
    EngineCounters(
        "SGLang",
        "sglang:",
        cached="sglang:cached_tokens_total",
        handed_over="sglang:kv_transfer_latency_ms_count",
    ),
    EngineCounters("Dynamo", "dynamo_", cached="dynamo_frontend_cached_tokens_sum"),
    EngineCounters("llama.cpp", "llamacpp:", cached=LLAMA_CACHED, proved=frozenset({LLAMA_CACHED})),
)


class Moved(NamedTuple):
    """How far a counter rose during the run. `name` is marked if it was never tried."""

    name: str
    by: float


def engine_of(page: Page | None, owner: str) -> str:
    """Name the engine by its metrics, or by `owned_by` of its models."""
    names = [sample.name for sample in page.samples] if page else []
    found = [one.engine for one in ENGINES if any(name.startswith(one.prefix) for name in names)]
    if ENGINES[0].engine in found:  # it also has some metrics by vLLM's names, for autoscalers that know only those
        return ENGINES[0].engine
    return " with ".join(found) or owner or "an unknown server"


def moved(before: Page | None, after: Page | None, name_in: Callable[[EngineCounters], str]) -> list[Moved]:
    if before is None or after is None:
        return []
    there = {sample.name for sample in after.samples}
    return [
        Moved(one.mark(name), after.total(name) - before.total(name))
        for one in ENGINES
        if (name := name_in(one)) in there
    ]
