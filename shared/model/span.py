"""Which layers of a model a pipeline's stage has. Knows nothing of weights or kernels."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.errors import ConfigError
from shared.model.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class Span:
    """Layers [first, end) of num_layers. The first stage has the embedding too, the last one norm and head."""

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
        """Those that run on all tokens: but the model's last, whose second half needs the wanted ones alone."""
        return range(self.first, self.end - self.is_last)

    def own(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `layers` that are here, counted from its first."""
        return tuple(layer - self.first for layer in layers if self.first <= layer < self.end)


def all_layers(config: LlamaConfig) -> Span:
    return Span(0, config.num_layers, config.num_layers)


def cut(config: LlamaConfig, num_stages: int, heads_every_row: bool) -> tuple[Span, ...]:
    """Neighbouring layers for each stage, at least one. `heads_every_row`: each step's rows all go through the head,
    as where answers are decoded; it then counts as so many layers as it has weights, and the last stage gets fewer."""
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
    """The head's weights in those of a layer."""
    head = config.vocab_size * config.hidden_size
    layers = config.num_parameters() - head * (1 if config.tie_embeddings else 2)
    return head * config.num_layers / layers
