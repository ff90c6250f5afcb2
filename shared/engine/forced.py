"""Put the tokens that a grammar forces before the drafter's drafts.

index of a token     p      p+1    p+2    p+3
forced               f0     f1     f2              known to the host at the plan: p tokens were processed
bonus, drafts               f1     f2     d3       the step before has drawn f0; d3 is the drafter's
"""

from __future__ import annotations

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import Drafts


def with_forced(fb: ForwardBatch, drafts: Drafts) -> Drafts:
    """Return the drafts with each row's forced tokens at their places, wherever its earlier steps have brought it."""
    forced, begins = fb.arrays.forced, fb.arrays.forced_from
    if forced is None or begins is None:
        return drafts
    first = fb.committed[fb.plan.num_prefill :] + 1 - begins
    places = first.unsqueeze(1) + torch.arange(fb.plan.width - 1, device=forced.device)
    ids = forced.gather(1, places.clamp(0, forced.shape[1] - 1))
    is_forced = (places >= 0) & (places < forced.shape[1]) & (ids >= 0)
    return merge(is_forced[:, :1], torch.where(is_forced, ids, drafts.ids), drafts)


def merge(stood: torch.Tensor, copies: torch.Tensor, drafts: Drafts) -> Drafts:
    """Take a row's drafts from the chains `copies` (D, n) int64 if `stood` (D, 1) is true, else from `drafts`."""
    ids = torch.where(stood, copies, drafts.ids)
    if drafts.parents is None:
        return Drafts(ids)
    before = torch.arange(ids.shape[1], device=ids.device)
    return Drafts(ids, torch.where(stood, before, drafts.parents))
