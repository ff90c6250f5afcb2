"""Copy drafts from a row's own tokens, without weights or state.

The method is prompt lookup decoding by Apoorv Saxena, 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).

    ... the quick brown fox jumps over ... said the quick | brown fox jumps
                  `- the drafts: tokens that followed the latest earlier copy of the last 3 (else 2, else 1) tokens

Like an LZ77 copy, drafts may continue into their own tokens, and so predict repetitions of any period. Without a match,
the last token is repeated. `lookup` runs on any device without a sync. On a CPU a kernel is faster than its small
operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureIndices, FutureMap, RelaySpec
from shared.engine.verify import Drafts, Verified
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.math.interface import ModelOutput
from shared.wire.fitting import NO_DRAFT_STATE

LONGEST_MATCH = 3


class NgramWorkerV2:
    state_name = NO_DRAFT_STATE
    relay_specs: Sequence[RelaySpec] = ()
    key_lookahead = 0
    drafts_trees = False
    reads_history = True

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return ()

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> Drafts:
        return Drafts(copies_of(fb, future_map)[0])

    def extend(
        self, fb: ForwardBatch, output: ModelOutput, verified: Verified, future_map: FutureMap, kv: KVPool
    ) -> dict[str, torch.Tensor]:
        return {}


def copies_of(fb: ForwardBatch, future_map: FutureMap) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drafts (D, width - 1) and matched lengths (D,) for the D decode rows."""
    first, num_drafts = fb.plan.num_prefill, fb.plan.width - 1
    rows, last = FutureIndices(fb.future.indices[first:]), fb.committed[first:]
    if last.device.type == "cpu":
        from shared.kernel.sampling.copies import lookup_on_cpu

        history = future_map.history_of(rows)
        return lookup_on_cpu(history.tokens, history.rows, last, LONGEST_MATCH, num_drafts)
    return lookup(future_map.history_tokens(rows, fb.plan.layout.max_seq_len), last, num_drafts)


def lookup(tokens: torch.Tensor, last: torch.Tensor, num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drafts (D, num_drafts) int64, and each row's number of matched tokens, (D,) int64, at most LONGEST_MATCH.

    tokens (D, n) int32: row d's tokens are known up to position last[d]. last (D,) int64, 0 < last < n.
    """
    ends, lengths = _match_ends(tokens, last)
    period = last - ends
    offsets = torch.arange(num_drafts, device=tokens.device)
    wanted = (ends + 1).unsqueeze(1) + offsets % period.unsqueeze(1)
    return tokens.gather(1, wanted).to(torch.int64), lengths


def _match_ends(tokens: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the end and length of each row's longest match, (D,) each.

    Without a match, return last - 1 and 0.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    lengths = torch.zeros_like(tokens)
    goes_on = positions < last.unsqueeze(1)
    for back in range(LONGEST_MATCH):
        wanted = tokens.gather(1, (last - back).clamp(min=0).unsqueeze(1))
        earlier = tokens.roll(back, dims=1)
        goes_on = goes_on & (earlier == wanted) & (positions >= back)
        lengths += goes_on
    ranks = lengths.to(torch.int64) * tokens.shape[1] + positions
    latest = ranks.argmax(dim=1)
    length = lengths.gather(1, latest.unsqueeze(1)).squeeze(1).to(torch.int64)
    return torch.where(length > 0, latest, last - 1), length
