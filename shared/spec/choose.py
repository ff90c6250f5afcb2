"""From settings to a draft algorithm. HashLM's heads are HashDraft."""

from __future__ import annotations

from shared.config.settings import SpecConfig
from shared.core.errors import ConfigError
from shared.engine.drafter import Drafter
from shared.model.hashdraft import HashDraft
from shared.model.hashlm import HashLM
from shared.model.interface import Model
from shared.spec.eagle import EagleWorkerV2
from shared.spec.multi_layer_eagle import MultiLayerEagleWorkerV2
from shared.spec.ngram import NgramWorkerV2


def make_drafter(config: SpecConfig, model: Model) -> Drafter | None:
    """ConfigError where the model has no draft head."""
    if config.spec == "none":
        return None
    if config.spec == "ngram":
        return NgramWorkerV2()
    vocab_size = model.spec.vocab_size
    if isinstance(model, HashLM):
        if config.spec == "eagle":
            return EagleWorkerV2(HashDraft(model), vocab_size)
        layers = [HashDraft(model, layer=layer) for layer in range(config.width - 1)]
        return MultiLayerEagleWorkerV2(layers, vocab_size)
    raise ConfigError(f"--spec {config.spec} has no draft head for model {model.spec.name!r}, only for hashlm")
