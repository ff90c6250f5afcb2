"""Make the configured drafter: n-gram copying, a head, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from shared.config.settings.frozen import ENCODER
from shared.config.settings.settings import SpecConfig
from shared.core.errors import ConfigError
from shared.engine.drafter import Drafter
from shared.kernel.team.team import Team
from shared.model.llama.eagle_head import DraftTarget
from shared.model.loading.load import load_eagle_head, load_mtp_heads
from shared.model.math.draft_head import StackedHead
from shared.model.math.interface import Model
from shared.speculation.copying import CopyingDrafter
from shared.speculation.eagle import EagleWorkerV2
from shared.speculation.multi_layer_eagle import MultiLayerEagleWorkerV2
from shared.speculation.ngram import NgramWorkerV2


def make_drafter(config: SpecConfig, name: str, model: Model, team: Team) -> Drafter | None:
    """Make the drafter. A shipped head is found by the model's `name`. Raises ConfigError for unfit settings."""
    if config.spec == "none":
        return None
    if config.spec == "ngram":
        return NgramWorkerV2()
    ENCODER.refuse({f"--spec {config.spec}": model.spec.has_encoder}, of=model.spec.name)
    head = _head_drafter(config, name, model, team)
    return CopyingDrafter(head, config.spec_copies) if config.spec_copies else head


def _head_drafter(config: SpecConfig, name: str, model: Model, team: Team) -> Drafter:
    hashed = _hash_drafter(config, model) if model.spec.dtype == "int" else None
    if hashed is not None:
        return hashed
    vocab_size = model.spec.vocab_size
    if config.spec == "mtp":
        return _mtp_drafter(config, load_mtp_heads(name, model), vocab_size)
    target = cast(DraftTarget, model)  # neither a HashLM nor a model with an encoder
    head = load_eagle_head(config.spec_head, name, target, team=team)
    target.capture_aux(head.aux_layers)
    return EagleWorkerV2(head, vocab_size, config.spec_topk, config.spec_steps)


def _mtp_drafter(config: SpecConfig, heads: Sequence[StackedHead], vocab_size: int) -> Drafter:
    """One MTP layer makes all drafts; several make one draft each."""
    if len(heads) == 1:
        return EagleWorkerV2(heads[0], vocab_size)
    if config.width > len(heads) + 1:
        raise ConfigError(
            f"--spec mtp --spec-width {config.width}: {len(heads)} MTP layers make {len(heads)} drafts; "
            f"use --spec-width {len(heads) + 1} or less"
        )
    return MultiLayerEagleWorkerV2(heads, vocab_size)


def _hash_drafter(config: SpecConfig, model: Model) -> Drafter | None:
    from shared.model.hashlm.draft import HashDraft  # loads CPU kernels
    from shared.model.hashlm.model import HashLM

    if not isinstance(model, HashLM):
        return None
    if config.spec == "eagle":
        return EagleWorkerV2(HashDraft(model), model.spec.vocab_size, config.spec_topk, config.spec_steps)
    layers = [HashDraft(model, layer=layer) for layer in range(config.width - 1)]
    return MultiLayerEagleWorkerV2(layers, model.spec.vocab_size)
