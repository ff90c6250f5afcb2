"""Run HashLM on several ranks, which divide the four 16-bit lanes of stored values as other models divide KV heads:

    page:   [kv0, kv1][slot][lane 0 | lane 1 | lane 2 | lane 3]    rank 0 of 2 has lanes 0 and 1, rank 1 has 2 and 3

Sums wrap at 64 bits, so the ranks' partial sums add up exactly to a single rank's sums. After each layer, every rank
collects and adds all ranks' sums.
"""

from __future__ import annotations

import numpy as np
import torch

from shared.core.errors import ConfigError
from shared.device.group import RankGroup
from shared.kv.pool import KVPool
from shared.model.hashlm.layer import NUM_LANES, Words, arrays_of, layers_of, run_layer, words_of
from shared.model.hashlm.model import HashLM
from shared.model.math.interface import AdapterSpec, Carried, ModelInputs, ModelOutput, Stage


class HashLMShard(HashLM):
    def __init__(self, group: RankGroup, max_context: int = 0, adapters: tuple[AdapterSpec, ...] = ()) -> None:
        super().__init__(max_context=max_context, adapters=adapters)
        if NUM_LANES % group.size:
            raise ConfigError(f"--tp {group.size}: hashlm has {NUM_LANES} lanes, which {group.size} does not divide")
        self._group = group
        self._num_lanes = NUM_LANES // group.size
        self._first = group.rank * self._num_lanes

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """All ranks call this with the same inputs."""
        step, (first, second) = arrays_of(inputs), layers_of(kv, self._first, self._num_lanes)
        lower = self._meet(run_layer(step, words_of(self.salted(inputs)), first))
        return self.output(inputs, lower, self._meet(run_layer(step, lower, second)))

    def _meet(self, sums: Words) -> Words:
        """Turn this rank's sums (T,) into sums over all lanes."""
        partial = self._group.stack(torch.from_numpy(sums.view(np.int64)))
        total: Words = words_of(partial).sum(axis=0, dtype=np.uint64)
        return total


def split(model: HashLM) -> tuple[Stage, Stage]:
    """Return two pipeline stages, one per layer, in order. Each uses only its own layer of the plane "kv".

    stage 0    ids, kv0     ->  s (T,)                      stage 1    s, kv1  ->  h, logits
    """

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
