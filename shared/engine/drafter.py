"""Define the interface of draft algorithms. Without a drafter (width 1), a step has neither `propose` nor `extend`.

propose -> target forward -> verify (the same for all drafters) -> publish -> extend -> stash
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
from shared.model.math.interface import ModelOutput


class Drafter(Protocol):
    """A draft algorithm, run on the forward stream inside the step's closures.

    Draft KV lies in the target's pages, so hand-offs and the prefix cache include it.

    - state_name: names the algorithm and its weights. Peers with equal names share draft state. "none": no draft state
      crosses the hand-off.
    - relay_specs: state that `extend` leaves in the FutureMap for the next `propose`; it crosses the hand-off.
    - key_lookahead: 1 if a slot's draft KV depends on the next token. A token's cache key then covers the next token.
    - drafts_trees: whether a window may hold several drafts after one token. If not, it is a chain.
    - reads_history: whether `propose` reads the FutureMap's history. If so, every row keeps a history.
    """

    state_name: str
    relay_specs: Sequence[RelaySpec]
    key_lookahead: int
    drafts_trees: bool
    reads_history: bool

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        """Return the planes that the drafter adds to each page, behind the target's planes."""
        ...

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> Drafts:
        """Return drafts for the step's D decode rows. plan.width is above 1.

        Input ids and history hold the bonus tokens. Each draft enters the history before the next draft is drawn.
        """
        ...

    def extend(
        self, fb: ForwardBatch, output: ModelOutput, verified: Verified, future_map: FutureMap, kv: KVPool
    ) -> dict[str, torch.Tensor]:
        """Write draft KV for all T tokens of the step.

        Return one (B, *shape) tensor for each name in `relay_specs`. Values of rows that do not emit are never read.
        Without plan.drafts_next, {} is enough.
        """
        ...
