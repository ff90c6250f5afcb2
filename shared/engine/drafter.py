"""What a draft algorithm gives to the worker. Width 1 has none: plain decoding is the same path without a drafter.

propose -> target forward -> verify (shared/engine/verify.py, the same for all) -> publish -> extend -> stash
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap, RelaySpec
from shared.engine.verify import Drafts, Verified
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.interface import ModelOutput


class Drafter(Protocol):
    """Both calls run on the forward stream, inside the step's closures. Draft KV lies in the same pages as the
    target's, so it is handed over and cached with them.

    state_name: what a peer's drafter must be called for its draft KV and relay to be of use here, weights included;
    "none" where nothing crosses the hand-off.
    relay_specs: what `extend` leaves in the FutureMap for the next `propose`, and what crosses the hand-off.
    key_lookahead: 1 where a slot's draft KV depends on the token after it: a page's cache key then covers that token.
    reads_history: whether `propose` reads tokens of its rows in the FutureMap's history, which every row then keeps.
    """

    state_name: str
    relay_specs: Sequence[RelaySpec]
    key_lookahead: int
    reads_history: bool

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        """What a page holds beside the target's planes, and after them."""
        ...

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> Drafts:
        """Drafts for the D decode rows of a step with plan.width > 1, from relayed state and draft KV. Input ids hold
        the bonus tokens; the history holds them too, and takes each draft before the next is drawn."""
        ...

    def extend(
        self, fb: ForwardBatch, output: ModelOutput, verified: Verified, future_map: FutureMap, kv: KVPool
    ) -> dict[str, torch.Tensor]:
        """Write draft KV for all T tokens of the step; verified.next_ids tells which token follows each.

        Returns (B, *shape) per name of `relay_specs`; rows that don't emit are not read.
        """
        ...
