"""A GPU's node in a process that can't import numba: its modules, and its core on the virtual GPU.

    python -m tests.support.machine.without_numba KIND ...

For each kind of cuda_core.py prints its streams, as one line of JSON. An import of numba or llvmlite raises, so that
the stack says who wanted it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shared.node.records.core import NodeCore
    from tests.support.gpus.cuda_core import Kind

BANNED = ("numba", "llvmlite")
PARTS = ("prefill_node.app", "decode_node.app", "shared.node.run")
PROMPT, TOKENS = (5, 6, 7, 5, 6, 7, 5, 6) * 3, 6


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in BANNED:
            raise ImportError(f"{name} was wanted")
        return None


def banned_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in BANNED]


def refuse() -> None:
    """From now on. The virtual device had a few machine instructions made by llvmlite; it needs it no more."""
    importlib.import_module("tests.support.virtual_gpu.freed")
    for name in banned_modules():
        del sys.modules[name]
    sys.meta_path.insert(0, Refuse())


def streams(core: NodeCore, grammar: str) -> list[list[int]]:
    """Of three requests, with all that a sampler can be asked."""
    from shared.core.keys import RequestKey
    from shared.core.request import NodeAsk, Request
    from shared.core.sampling_params import SamplingParams
    from shared.sched.steps.events import Ended

    asked = (
        SamplingParams(TOKENS, temperature=0.0, grammar=grammar),
        SamplingParams(TOKENS, temperature=0.8, top_p=0.9, repetition_penalty=1.2, num_logprobs=2, prompt_logprobs=1),
        SamplingParams(TOKENS, temperature=0.7, top_k=8, min_p=0.01, bad_words=((1,), (2, 1)), grammar=grammar),
    )
    prompt = np.asarray(PROMPT, np.int64)
    requests = [
        Request(RequestKey("test", 0, str(n), 0, 0), NodeAsk(prompt, sampling, n), n)
        for n, sampling in enumerate(asked)
    ]
    for request in requests:
        core.submit(request)
    while not core.idle:
        core.step(block=True)
    ends = [event for event in core.take_events() if isinstance(event, Ended)]
    assert len(ends) == len(requests) and all(end.error is None for end in ends), ends
    core.close()
    core.streams.stop()
    return [list(map(int, request.output_ids)) for request in requests]


def run(kind: Kind, on_gpu: bool) -> list[list[int]]:
    """On the virtual GPU, or the CPU."""
    from llguidance import LLMatcher

    from tests.support.gpus.cuda_core import make_core
    from tests.support.virtual_gpu.device import make_device

    grammar = LLMatcher.grammar_from_regex(r"[0-9]{3}-[a-f]{4}") if kind.grammars else ""
    return streams(make_core(kind, make_device("eager") if on_gpu else None), grammar)


def main(kinds: Sequence[str]) -> None:
    refuse()
    for part in PARTS:
        importlib.import_module(part)
    from tests.support.gpus.cuda_core import KINDS

    for name in kinds:
        print(json.dumps(run(KINDS[name], on_gpu=True)), flush=True)
    assert not banned_modules(), banned_modules()


if __name__ == "__main__":
    main(sys.argv[1:])
