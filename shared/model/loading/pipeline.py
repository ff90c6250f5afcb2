"""Run a model in pipeline stages: neighbouring layers with their own kernels, scratch and threads.

    stage 0     ids -> embed, layers [0, a)      -> residual (T, H) float32, aux captured for a draft head
    stage 1     residual -> layers [a, b)        -> residual ...
    last        residual -> layers [b, n), norm, head on the wanted rows  -> logits

The residual is float32 everywhere, so any cut gives the same bits. Pages hold all layers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from shared.config.models.model_folder import read_folder
from shared.config.settings.frozen import ENCODER, LIBRARY
from shared.core.errors import ConfigError
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.formats.choice import described
from shared.model.formats.opened import EncoderFolder, LibraryFolder, LoadOptions, OpenedModel, open_named
from shared.model.hashlm.model import HashLM
from shared.model.hashlm.shard import split
from shared.model.llama.lora import LlamaLike
from shared.model.loading.load import build_spans, warm_up
from shared.model.math.interface import Carried, Model, ModelInputs, ModelOutput, Stage
from shared.model.math.span import cut


class StagedModel:
    """A Model that runs its stages in turn, on one stream. The engine runs `stages` itself, each on its own stream."""

    def __init__(self, parts: Sequence[LlamaLike]) -> None:
        self._parts = tuple(parts)
        first = self._parts[0]
        self.spec, self.config, self.embed = first.spec, first.config, first.embed

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(part.run for part in self._parts)

    def capture_aux(self, layers: tuple[int, ...]) -> None:
        for part in self._parts:
            part.capture_aux(layers)

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return self._parts[0].kv_planes(page_size)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        passed: Carried | ModelOutput | None = None
        for part in self._parts:
            assert not isinstance(passed, ModelOutput)
            passed = part.run(inputs, passed, kv)
        assert isinstance(passed, ModelOutput)
        return passed


def load_pipeline(
    name: str, options: LoadOptions, num_stages: int, *, heads_every_row: bool = True
) -> tuple[Model, tuple[Stage, ...]]:
    """Return a Model that runs all stages, and the stages. `heads_every_row`: see `cut`. Raises ConfigError."""
    opened = open_named(name, options)
    if opened is None:
        return split_hashlm(HashLM(max_context=options.max_context, adapters=options.path_adapters()), num_stages)
    if isinstance(opened, EncoderFolder):
        raise ENCODER.refusal([f"--pp {num_stages}"], of=name)
    if isinstance(opened, LibraryFolder):
        raise LIBRARY.refusal([f"--pp {num_stages}"], of=described(read_folder(opened.path)))
    opened.check_memory(opened.source.config)
    pipeline = build_pipeline(opened, num_stages, heads_every_row)
    warm_up(pipeline)
    return pipeline, pipeline.stages


def split_hashlm(model: HashLM, num_stages: int) -> tuple[Model, tuple[Stage, ...]]:
    stages = split(model)
    if num_stages != len(stages):
        raise ConfigError(f"--pp {num_stages}: {model.spec.name} has {len(stages)} layers, and each stage needs one")
    return model, stages


def build_pipeline(opened: OpenedModel, num_stages: int, heads_every_row: bool) -> StagedModel:
    spans = cut(opened.source.config, num_stages, heads_every_row)
    parts = build_spans(opened, torch.device("cpu"), spans)
    listed = ", ".join(f"{span.first}..{span.end - 1}" for span in spans)
    logging.getLogger(__name__).info("layers of the stages: %s", listed)
    return StagedModel(parts)
