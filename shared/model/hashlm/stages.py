"""Run HashLM in two pipeline stages, one per layer.

stage 0    ids, kv0     ->  s (T,)                      stage 1    s, kv1  ->  h, logits
"""

from __future__ import annotations

import numpy as np
import torch

from shared.kv.pool import KVPool
from shared.model.hashlm.layer import arrays_of, layers_of, run_layer, words_of
from shared.model.hashlm.model import HashLM
from shared.model.math.interface import Carried, ModelInputs, ModelOutput, Stage


def split(model: HashLM) -> tuple[Stage, Stage]:
    """Return the two stages, in order. Each uses only its own layer of the plane "kv"."""

    def lower(inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried:
        sums = run_layer(arrays_of(inputs), words_of(model.salted(inputs)), layers_of(kv)[0], model.windows[0])
        return Carried(torch.from_numpy(sums.view(np.int64)))

    def upper(inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> ModelOutput:
        assert carried is not None
        given = words_of(carried.values)
        return model.output(
            inputs, given, run_layer(arrays_of(inputs, group=-1), given, layers_of(kv)[1], model.windows[1])
        )

    return lower, upper
