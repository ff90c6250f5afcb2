"""Which checks there are, the most valuable first, and what each is thought to take. Imports nothing that it names.

A run has a budget: before a check that may not fit any more it stops, and the next run goes on there.
"""

from __future__ import annotations

from dataclasses import dataclass

CHECKS_PACKAGE = "tests.gpu.checks"
HANG_GUARD_S = 420.0  # several times what the longest check is thought to take, and shorter than a run


@dataclass(frozen=True, slots=True)
class Check:
    """`run`: module and function in tests/gpu/checks, called with the place and `arguments`. `seconds`: a guess of
    what it takes on a GPU machine, start of the process included. `plans`: which commands run it."""

    name: str
    run: str
    seconds: float
    arguments: tuple[str, ...] = ()
    plans: tuple[str, ...] = ("test",)


CHECKS = (
    Check("copies, products, reads", "rates.rates", 40, plans=("test", "bench")),
    Check("logits of prompts, steps, windows", "values.logits", 25),
    Check("draws of the sampler", "values.draws", 25),
    Check("kernels, attention", "kernels.attention", 60),
    Check("splits", "splits.splits", 60),
    Check("two layers of 8B at 4k tokens", "splits.network", 40),
    Check("rows that outgrow a graph", "splits.growth", 40),
    Check("kernels, norm and gate", "kernels.blocks", 20),
    Check("kernels, weights in bytes", "kernels.weights", 20),
    Check("kernels, draws", "kernels.draws", 30),
    Check("streams, plain", "streams.kinds", 45, ("plain", "alternating", "exact lengths", "int8 KV", "fp8 KV")),
    Check("host waits in the steady state", "order.silent_steps", 45),
    Check("pages through pinned memory", "values.staged_pages", 20),
    Check("two nodes over zmq, one killed", "pair.pair", 90, ("zmq",)),
    Check("streams, drafted", "streams.kinds", 60, ("n-gram", "chain", "tree", "copies")),
    Check("streams, graphs", "streams.graphs", 90, ("plain", "n-gram", "chain", "tree", "int8 KV", "fp8 KV")),
    Check(
        "streams, grammars", "streams.kinds", 60, ("grammars", "grammars, n-gram", "grammars, chain", "grammars, tree")
    ),
    Check("streams, adapters", "streams.kinds", 45, ("adapters", "adapters, tree")),
    Check("races", "order.races", 90),
    Check("speed, kernels", "kernels.speed", 60, plans=("bench",)),
    Check("speed, 0.6B", "speed.speed", 110, ("0.6B",), plans=("bench",)),
    Check("speed, 8B", "speed.speed", 200, ("8B",), plans=("bench",)),
    Check("cost of --deterministic, 0.6B", "speed.deterministic", 90, ("0.6B",), plans=("bench",)),
    Check("transformers, 0.6B", "speed.transformers", 50, ("0.6B",), plans=("bench",)),
    Check("transformers, 8B", "speed.transformers", 80, ("8B",), plans=("bench",)),
    Check("streams, mixtures of experts", "streams.families", 60, ("qwen3-moe",)),
    Check("streams, sliding windows", "streams.families", 60, ("mistral", "gemma3")),
    Check("streams, dense families", "streams.families", 90, ("llama", "qwen2", "qwen3")),
    Check("another process's memory", "values.shared_memory", 25),
    Check("two nodes over cuda_ipc, one killed", "pair.pair", 90, ("cuda_ipc",)),
)
PLANS = ("test", "bench")


def checks_of(plan: str) -> tuple[Check, ...]:
    return tuple(check for check in CHECKS if plan in check.plans)


def check_named(name: str) -> Check:
    """KeyError where there is none."""
    return {check.name: check for check in CHECKS}[name]
