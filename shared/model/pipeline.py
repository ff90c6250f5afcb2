"""A model in pipeline stages: neighbouring layers each, with kernels, scratch and threads of their own.

    stage 0     ids -> embed, layers [0, a)      -> residual (T, H) float32, what was captured for a draft head
    stage 1     residual -> layers [a, b)        -> residual ...
    last        residual -> layers [b, n), norm, head on the wanted rows  -> logits

The residual is carried in float32 with all that the layers so far add, as one model's next layer would find it: so any
cut gives the bits of one model. A page belongs to the node and has all layers; each stage works on its own of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import psutil
import torch

from shared.config.encoder_decoder import has_encoder
from shared.config.model_path import resolve_model
from shared.core.errors import ConfigError
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.hashlm.model import HashLM
from shared.model.hashlm.stages import split
from shared.model.interface import Carried, Model, ModelInputs, ModelOutput, Stage
from shared.model.kernels import AS_DTYPE, Formats, pick_kernels
from shared.model.load import (
    DTYPES,
    WINDOW_SLACK,
    assemble,
    check_memory,
    context_of,
    load_model,
    open_adapters,
    open_model,
    spec_of,
    warm_up,
)
from shared.model.lora import LlamaLike, load_adapter
from shared.model.lora_file import LoraFolder
from shared.model.span import cut
from shared.model.weights import TensorSource, load_weights, weights_bytes


class Pipeline:
    """Implements Model: its stages one after the other. The engine runs `stages` itself, each on its own stream."""

    def __init__(self, parts: Sequence[LlamaLike]) -> None:
        self._parts = tuple(parts)
        first = self._parts[0]
        self.spec, self.config, self.embed = first.spec, first.config, first.embed

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(part.run for part in self._parts)

    def capture_aux(self, layers: tuple[int, ...]) -> None:
        """From now on ModelOutput.aux holds the residual of all tokens before each of these layers; () for none."""
        for part in self._parts:
            part.capture_aux(layers)

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return self._parts[0].kv_planes(page_size)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """All on the caller's stream; the returned tensors are fresh and belong to the caller."""
        passed: Carried | ModelOutput | None = None
        for part in self._parts:
            assert not isinstance(passed, ModelOutput)
            passed = part.run(inputs, passed, kv)
        assert isinstance(passed, ModelOutput)
        return passed


def load_pipeline(
    name: str,
    dtype: str,
    num_stages: int,
    *,
    heads_every_row: bool = True,
    max_context: int = 0,
    threads: int = 1,
    kernels: str = "auto",
    adapters: Mapping[str, str] | None = None,
    formats: Formats = AS_DTYPE,
) -> tuple[Model, tuple[Stage, ...]]:
    """load_model(name, dtype, "cpu") and its stages. `threads`: of each stage. `heads_every_row`: see `cut`.
    ConfigError where the model has fewer layers than stages are asked for."""
    adapters = adapters or {}
    found = resolve_model(name)
    if found.path is None:
        model = load_model(name, dtype, max_context=max_context, threads=threads, adapters=adapters, formats=formats)
        return model, _split_hashlm(model, num_stages)
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if has_encoder(found.path):
        raise ConfigError(f"--pp {num_stages}: models with an encoder ({name}) are not cut into stages yet")
    source = open_model(found.path)
    context = context_of(source, max_context)
    item = None if formats.weights == "auto" else 1
    check_memory(weights_bytes(source.config, DTYPES[dtype], context, item), psutil.virtual_memory().available)
    folders = open_adapters(adapters, source.config)
    pipeline = build_pipeline(
        source, dtype, num_stages, context, threads, kernels, folders, formats, heads_every_row=heads_every_row
    )
    warm_up(pipeline)
    return pipeline, pipeline.stages


def _split_hashlm(model: Model, num_stages: int) -> tuple[Stage, ...]:
    assert isinstance(model, HashLM)
    stages = split(model)
    if num_stages != len(stages):
        raise ConfigError(f"--pp {num_stages}: {model.spec.name} has {len(stages)} layers, and each stage needs one")
    return stages


def build_pipeline(
    source: TensorSource,
    dtype: str,
    num_stages: int,
    context: int,
    threads: int,
    kernels: str,
    folders: Mapping[str, LoraFolder],
    formats: Formats,
    *,
    heads_every_row: bool,
) -> Pipeline:
    """Weights are loaded once: a product belongs to one layer, and so to one stage."""
    config, device, number = source.config, torch.device("cpu"), DTYPES[dtype]
    spans = cut(config, num_stages, heads_every_row)
    picked = [pick_kernels(config, number, device, threads, kernels == "torch", formats) for _ in spans]
    make = picked[0]
    weights = load_weights(source, number, device, context + WINDOW_SLACK, make.make_weight, make.make_head)
    spec = spec_of(source, dtype, context, formats, folders)
    own = [load_adapter(folder.pairs, config, number, device, make.make_linear) for folder in folders.values()]
    parts = [
        assemble(config, spec, weights, own_kernels, own, kernels == "auto", span)
        for own_kernels, span in zip(picked, spans, strict=True)
    ]
    told = ", ".join(f"{span.first}..{span.end - 1}" for span in spans)
    logging.getLogger(__name__).info("layers of the stages: %s", told)
    return Pipeline(parts)
