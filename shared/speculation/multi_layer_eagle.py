"""Draft with one draft layer per draft (MTP: DeepSeek-V3, arXiv 2412.19437, section 2.2).

    slot            L-1                 L                    L+1                      L = committed
    layer 0   (bonus, feature)                                                        draws draft 1, in extend
    layer 1   (bonus, 0 at L-2)   (draft 1, 0 at L-1)                                 draws draft 2
    layer 2   (bonus, 1 at L-2)   (draft 1, 1 at L-1)   (draft 2, 1 at L)             draws draft 3
                                  `- propose: layer i runs over i slots, which the next extend writes again

A layer reads the token after its slot, and the previous layer's state one slot back ("0 at L-2": layer 0's state at
slot L-2). Layer 0 reads the target's feature of its slot instead of a state. A plane of the pages holds the hidden
states, so they survive chunks, prefix-cache hits and hand-offs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureIndices, FutureMap, RelaySpec
from shared.engine.verify import Drafts, Verified, last_token_idx, next_ids
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.math.draft_head import StackedHead
from shared.model.math.interface import ModelOutput
from shared.speculation.draw import Draw
from shared.speculation.views import aux_of, per_row, view_of, window_of

HIDDEN_PLANE = "mtp_hidden"


class MultiLayerEagleWorkerV2:
    """A Drafter of two or more layers, all with features of one shape. A window has at most len(layers) + 1 tokens.

    Relayed per row: topk_index (1,) int64, the first draft.
    """

    key_lookahead = 1
    drafts_trees = False
    reads_history = False

    def __init__(self, layers: Sequence[StackedHead], vocab_size: int) -> None:
        self._layers = tuple(layers)
        self._vocab_size = vocab_size
        self.state_name = f"mtp, layers {' '.join(layer.weights_hash for layer in self._layers)}"
        self.relay_specs: Sequence[RelaySpec] = (RelaySpec("topk_index", (1,), torch.int64),)

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        first = self._layers[0]
        shape = (len(self._layers) - 1, page_size, *first.hidden_shape)
        planes = [plane for layer in self._layers for plane in layer.kv_planes(page_size)]
        return (*planes, PlaneSpec(HIDDEN_PLANE, shape, first.hidden_dtype))

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> Drafts:
        plan, first = fb.plan, fb.plan.num_prefill
        if plan.width > len(self._layers) + 1:
            raise ValueError(f"a window of {plan.width} tokens needs {plan.width - 1} layers, not {len(self._layers)}")
        rows = FutureIndices(fb.future.indices[first:])
        draw = Draw(fb, future_map, self._vocab_size, *fb.decode_rows())
        committed, drafts = fb.committed[first:], future_map.relayed("topk_index", rows)
        kept = KeptHidden(fb, kv)
        below = kept.none(len(committed))
        for i in range(1, plan.width - 1):
            slots = committed.unsqueeze(1) + torch.arange(i, device=committed.device)
            features = torch.cat([kept.before(first, i - 1).unsqueeze(1), below], dim=1)
            hidden = self._layers[i].states(drafts.reshape(-1), features.flatten(0, 1), window_of(fb, slots), kv)
            below = hidden.view_as(features)
            last = self._layers[i].logits(below[:, -1])
            draft = draw.next(self._layers[i], last, drafts[:, -1], slots[:, -1] + 1)
            drafts = torch.cat([drafts, draft.unsqueeze(1)], dim=1)
        return Drafts(drafts)

    def extend(
        self, fb: ForwardBatch, output: ModelOutput, verified: Verified, future_map: FutureMap, kv: KVPool
    ) -> dict[str, torch.Tensor]:
        view, kept, ids = view_of(fb), KeptHidden(fb, kv), next_ids(fb, verified)
        first = hidden = self._layers[0].states(ids, self._layers[0].project(aux_of(output)), view, kv)
        for i, layer in enumerate(self._layers[1:]):
            features = kept.one_slot_back(hidden, i)
            kept.keep(hidden, i)
            hidden = layer.states(ids, features, view, kv)
        rows = fb.arrays.emitting
        if not len(rows):
            return {}
        draw = Draw(fb, future_map, self._vocab_size, fb.host.emitting, rows)
        last = self._layers[0].logits(first[last_token_idx(fb, verified)[rows]])
        drafts = draw.next(self._layers[0], last, verified.next_token[rows], verified.seq_lens[rows])
        state = {"topk_index": drafts.unsqueeze(1)}
        return per_row(state, rows, fb.plan.batch_size)


class KeptHidden:
    def __init__(self, fb: ForwardBatch, kv: KVPool) -> None:
        self._plane = kv.plane(HIDDEN_PLANE)  # (num_pages, layers - 1, page_size, H)
        self._inputs = fb.inputs
        self._rows = fb.arrays.token_rows
        self._starts = fb.inputs.layout.cu_q_lens[:-1].to(torch.int64)

    def none(self, num_rows: int) -> torch.Tensor:
        """Return (num_rows, 0, H)."""
        return self._plane.new_zeros((num_rows, 0, self._plane.shape[3]))

    def keep(self, hidden: torch.Tensor, layer: int) -> None:
        """Store a layer's hidden states (T, H)."""
        self._plane[:, layer][self._places(self._rows, self._inputs.positions)] = hidden

    def before(self, first_row: int, layer: int) -> torch.Tensor:
        """Return a layer's state one slot before each row's start, or 0 for a start at position 0."""
        starts = self._starts[first_row:]
        positions = self._inputs.positions[starts]
        found = self._plane[:, layer][self._places(self._rows[starts], (positions - 1).clamp(min=0))]
        return found * (positions > 0).unsqueeze(1)

    def one_slot_back(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """Shift hidden states (T, H) by one slot. Each row's first state then comes from an earlier step."""
        moved = hidden.roll(1, dims=0)
        moved[self._starts] = self.before(0, layer)
        return moved

    def _places(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page_size = self._plane.shape[2]
        table = self._inputs.layout.of_group().page_table
        return table[rows, positions // page_size].to(torch.int64), positions % page_size
