"""What a draft algorithm gives to the worker. Width 1 has none: plain decoding is the same path without a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap, RelaySpec
from shared.kv.pool import KVPool


class Drafter(Protocol):
    """Both calls run on the forward stream, inside the step's closures. Draft KV lies in the same pages as the
    target's, so it is handed over and cached with them."""

    relay_specs: Sequence[RelaySpec]

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> torch.Tensor:
        """Draft ids (D, width - 1) int64 of the D decode rows, from relayed state and draft KV."""
        ...

    def extend(self, fb: ForwardBatch, next_ids: torch.Tensor, kv: KVPool) -> None:
        """Write draft KV for all T tokens; next_ids[t] (T,) int64 is the token that follows token t."""
        ...
