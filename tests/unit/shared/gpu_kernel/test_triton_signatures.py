"""What a GPU would compile while it serves is what was compiled ahead: whole steps of real models, launched on the
"meta" device, give no signature that the table of real models lacks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from shared.engine.buckets import PROMPT_TOKENS
from shared.gpu_kernel.launch.real_models import REAL_MODELS
from shared.model.math.config import LlamaConfig, RopeConfig
from shared.model.math.kernels import AS_DTYPE, Formats
from tests.support.kernels import ahead
from tests.support.models.meta_models import PromptGraph, Step, meta_model

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
launcher, signatures = interpreter.kernels("launch.launcher"), interpreter.kernels("launch.signatures")

USUAL = "Llama-3.1-8B"
LONG, SHORT = 131_072, 200
STEPS: dict[str, Step | PromptGraph] = {
    "one row": Step(1),
    "two rows": Step(2, context=LONG),
    "16 rows": Step(16, context=SHORT),
    "17 rows": Step(17, context=LONG),
    "256 rows": Step(256),
    "windows": Step(17, width=4),
    "short windows": Step(1, width=4, context=SHORT),
    "a chunk": Step(0, chunks=(8192,), context=8192),
    "chunks": Step(0, chunks=(17, 100, 1)),
    "chunks and rows": Step(5, chunks=(300, 1)),
    "chunks and windows": Step(5, width=3, chunks=(300,)),
    "a small graph of prompts": PromptGraph(PROMPT_TOKENS[0], LONG),
    "a large graph of prompts": PromptGraph(PROMPT_TOKENS[-1], LONG),
}
TREES = {"trees": Step(3, width=6, is_tree=True), "short trees": Step(3, width=6, context=SHORT, is_tree=True)}


@dataclass(frozen=True)
class Served:
    """A model and what is asked of it."""

    model: str
    formats: Formats = AS_DTYPE
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    is_fixed: bool = False

    @property
    def config(self) -> LlamaConfig:
        model = next(one for one in REAL_MODELS if one.name == self.model)
        family = "qwen3" if "Qwen3" in model.name else "llama"
        sizes = (model.vocab_size, model.hidden_size, model.intermediate_size, 3)
        heads = (model.num_heads, model.num_kv_heads, model.head_dim)
        windows = (0, self.window, 0) if self.window else ()
        return LlamaConfig(
            model.name, family, *sizes, *heads, 1e-5, RopeConfig(5e5), LONG, False, (0,), windows=windows
        )


MODELS = {model.name: Served(model.name) for model in REAL_MODELS}
WAYS = {
    "float16": Served(USUAL, dtype=torch.float16),
    "int8 KV": Served(USUAL, Formats(kv="int8")),
    "fp8 KV": Served(USUAL, Formats(kv="fp8")),
    "fp8 weights": Served(USUAL, Formats(weights="fp8")),
    "window": Served(USUAL, window=4096),
    "fixed": Served(USUAL, is_fixed=True),
    "fixed, fp8 weights": Served(USUAL, Formats(weights="fp8"), is_fixed=True),
}


@cache
def compiled_ahead() -> frozenset[object]:
    return frozenset(
        signature
        for module in ahead.kernel_modules()
        for signature in importlib.import_module(module).real_signatures()
    )


def launched(served: Served, steps: dict[str, Step | PromptGraph]) -> Iterator[tuple[str, object]]:
    model, pool = meta_model(served.config, 64, served.formats, served.dtype, is_fixed=served.is_fixed)
    for name, step in steps.items():
        with torch.inference_mode(), launcher.recorded() as seen:
            model.forward(step.inputs(served.config.groups.num_groups), pool)
        assert seen
        yield from ((name, signature) for signature in seen)


@pytest.mark.parametrize("name", [*MODELS, *WAYS])
def test_a_step_launches_what_was_compiled_ahead(name: str) -> None:
    served = (MODELS | WAYS)[name]
    steps = STEPS | TREES if served.model == USUAL else STEPS
    lacking = {f"{step}: {signature.describe()}" for step, signature in launched(served, steps)
               if signature not in compiled_ahead()}  # fmt: skip
    assert not lacking, "\n".join(sorted(lacking))
