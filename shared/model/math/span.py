"""Name the layers of a pipeline stage, and cut a model into stages."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.errors import ConfigError
from shared.model.math.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class Span:
    """Layers [first, end) of num_layers. The first stage also has the embedding; the last stage also has norm and
    head."""

    first: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers

    @property
    def whole_layers(self) -> range:
        """The layers that run completely on all tokens: all but the model's last, whose second half runs on wanted rows
        only."""
        return range(self.first, self.end - self.is_last)

    def own(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers in `layers` that are in the span, counted from the span's first layer."""
        return tuple(layer - self.first for layer in layers if self.first <= layer < self.end)


def all_layers(config: LlamaConfig) -> Span:
    return Span(0, config.num_layers, config.num_layers)


def cut(config: LlamaConfig, num_stages: int, heads_every_row: bool) -> tuple[Span, ...]:
    """Cut a model into stages of neighbouring layers, at least one layer each.

    `heads_every_row`: whether all rows go through the head, as in decoding. The head then counts as layers
    with as many parameters.
    """
    num_layers = config.num_layers
    if num_stages > num_layers:
        raise ConfigError(f"--pp {num_stages}: {config.name} has {num_layers} layers, and each stage needs one")
    head = head_layers(config) if heads_every_row else 0.0
    each = (num_layers + head) / num_stages
    ends = [0]
    for stage in range(1, num_stages):
        left = num_stages - stage
        ends.append(min(max(round(stage * each), ends[-1] + 1), num_layers - left))
    return tuple(Span(first, end, num_layers) for first, end in zip(ends, [*ends[1:], num_layers], strict=True))


def head_layers(config: LlamaConfig) -> float:
    head = config.vocab_size * config.hidden_size
    layers = config.num_parameters() - head * (1 if config.tie_embeddings else 2)
    return head * config.num_layers / layers
