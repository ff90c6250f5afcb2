"""Which checks there are: three scripts, each with a clock of its own, the worst tested first.

    right    is it right? Several checks at a time
    fast     how fast is it? One after the other
    served   router, prefill and decode with a real model

Imports nothing that it names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CHECKS_PACKAGE = "tests.gpu.checks"
HANG_GUARD_S = 240.0  # several times what the longest check takes
# What one run measured, and so what the next one expects: `python -m tests.gpu.run ... --renew` writes it.
MEASURED = Path(__file__).with_name("measured.json")


class NotHere(Exception):
    """A check can't be run in this place; says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """`run`: module and function in tests/gpu/checks, called with the place and `arguments`. `guess_s`: what it takes
    on a GPU machine, start of the process and compiling included, as long as nobody has measured it."""

    name: str
    run: str
    guess_s: float
    arguments: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return float(measured()["seconds"].get(self.name, self.guess_s))


@dataclass(frozen=True, slots=True)
class Script:
    """`most_s`: after that, nothing of it runs any more. `jobs`: checks at a time; each needs two cores."""

    most_s: float
    jobs: int
    checks: tuple[Check, ...]


MODELS = (
    "Llama-3.1-8B", "SmolLM2-135M", "Llama-3.1-70B", "Qwen2.5-7B", "Qwen3-0.6B", "Gemma-2-9B", "Phi-3-mini",
    "StableLM-3B",
)  # fmt: skip
RIGHT = (
    *(Check(f"attention of {name}", "real.attention", 60 if name == MODELS[0] else 20, (name,)) for name in MODELS),
    Check("merge of splits", "real.merge", 10),
    Check("two layers of 8B at 4k tokens", "network.network", 15),
    Check("rows that outgrow a graph", "network.growth", 20),
    Check(
        "streams, graphs",
        "streams.graphs",
        75,
        ("plain", "n-gram", "chain", "tree", "int8 KV", "fp8 KV", "adapters", "grammars", "grammars, n-gram"),
    ),
    Check(
        "streams, library",
        "streams.library",
        60,
        ("gemma3_text", "llama", "gemma2", "deepseek_v3", "qwen3_moe", "gpt_oss"),
    ),
    Check("kernels, products", "real.products", 40),  # fp8 rows, grouped experts
    Check("attention of FlashInfer", "library_attention.attention", 200),  # if it is there; it compiles its kernels
    Check("another process's memory", "values.shared_memory", 25),
    Check("two nodes over cuda_ipc, one killed", "pair.pair", 45, ("cuda_ipc",)),
    Check("doctor", "doctor.doctor", 15),
    Check("kernels, attention in bfloat16", "kernels.attention", 45, ("bfloat16",)),
    Check("races", "order.races", 60),
    Check("kernels, attention", "kernels.attention", 50, ("as they are",)),
    Check("kernels, draws", "kernels.draws", 30),
    Check("sampling of real vocabularies", "real.sampling", 40),
    Check("kernels, norm and gate", "real.blocks", 20),
    Check("kernels, pages", "real.pages", 10),
    Check("kernels, preparing", "real.preparing", 10),
    Check("pages through pinned memory", "values.staged_pages", 15),
    Check("host waits in the steady state", "order.silent_steps", 30),
    Check("two nodes over zmq, one killed", "pair.pair", 30, ("zmq",)),
    Check("logits of prompts, steps, windows", "values.logits", 20),
    Check("draws of the sampler", "values.draws", 20),
    Check("streams, plain", "streams.kinds", 20, ("plain", "alternating", "exact lengths", "int8 KV", "fp8 KV")),
    Check("streams, drafted", "streams.kinds", 20, ("n-gram", "chain", "tree", "copies")),
    Check(
        "streams, grammars", "streams.kinds", 25, ("grammars", "grammars, n-gram", "grammars, chain", "grammars, tree")
    ),
    Check("streams, adapters", "streams.kinds", 20, ("adapters", "adapters, tree")),
    Check("streams, mixtures of experts", "streams.families", 20, ("qwen3-moe",)),
    Check("streams, sliding windows", "streams.families", 25, ("mistral", "gemma3")),
    Check("streams, dense families", "streams.families", 25, ("llama", "qwen2", "qwen3")),
)
FAST = (
    Check("copies, products, reads", "rates.rates", 5),
    Check("speed, kernels", "kernel_speed.speed", 25),
    Check("speed, 8B", "speed.speed", 40, ("8B",)),
    Check("speed, 0.6B", "speed.speed", 30, ("0.6B",)),
    Check("cost of --deterministic, 0.6B", "speed.deterministic", 40, ("0.6B",)),
)
SERVED = (
    Check("served, the CPU's tokens", "served.same_tokens", 35),
    Check("served, every parameter, 32 streams, one node killed", "served.everything", 35),
    Check("served, 0.6B", "served.latency", 35),
    Check("transformers, 8B", "speed.transformers", 30, ("8B",)),
)
SCRIPTS = {"right": Script(430, 8, RIGHT), "fast": Script(260, 1, FAST), "served": Script(170, 1, SERVED)}
PAIR = (
    Check("two GPUs, cuda_ipc across them", "pair.across", 60, ("cuda_ipc",)),
    Check("two GPUs, nccl", "pair.across", 60, ("nccl",)),
    Check("two GPUs, one node", "pair.divided", 80),
)
SCRIPTS["pair"] = Script(300, 1, PAIR)  # of a machine with two GPUs
CHECKS = tuple(check for script in SCRIPTS.values() for check in script.checks)


def check_named(name: str) -> Check:
    """KeyError where there is none."""
    return {check.name: check for check in CHECKS}[name]


@cache
def measured() -> dict[str, Any]:
    """The machine and date of the last committed run, the seconds of its checks, and what they found, by check."""
    found: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found
