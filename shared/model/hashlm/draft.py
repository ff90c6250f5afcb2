"""Define HashDraft, the draft head of HashLM. A hash of the position decides which of this layer's drafts are right.

    slot s of its plane:  forward's arguments at s, which are token s + 1, HashLM's two sums after 0..s, and depth
    hidden:               the sums after 0..s+1, which the target will have there if that token comes
    logits:               the target's logits for these sums; reversed where the draft is wrong

Each forward checks that each earlier slot's sums and token lead to the next slot's sums. A wrong page, a stale slot, or
another row's token or hidden state breaks all later drafts. `depth` counts draft steps since the target's feature. So
it reveals slots that were not rewritten with the target's feature. A verify step accepts one token more than its
leading drafts that are hits (`is_hit`). Bad draft state lowers this number, but never changes the stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.sampling.noise_numba import exact
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.hashlm.layer import mix, odd_weight, window_begin
from shared.model.hashlm.model import HashLM
from shared.model.math.draft_head import DraftOutput

# columns of a feature: HashLM's sums up to the token at POSITION, and the feature's depth
LOWER, UPPER, DEPTH, POSITION = range(4)
NEXT_ID, SLOT_LOWER, SLOT_UPPER, SLOT_DEPTH = range(4)  # columns of a slot
BAD = -1  # the depth of a broken chain
AVERSION = -1024.0  # factor for a wrong draft's logits, so that only the target's unlikely ids are drawn

_u64 = np.uint64
Ints = npt.NDArray[np.int64]


@exact
def is_hit(position: int, hit_rate: int) -> np.bool_:
    return np.int64(mix(_u64(0xD4AF7), position) % _u64(100)) < hit_rate


@exact
def _advance(lower: np.int64, upper: np.int64, token_id: np.int64, position: int) -> tuple[np.int64, np.int64]:
    weight = odd_weight(position)
    new_lower = _u64(lower) + mix(_u64(token_id), position) * weight
    return np.int64(new_lower), np.int64(_u64(upper) + mix(new_lower, position) * weight)


@exact
def _follows(slot: Ints, lower: np.int64, upper: np.int64, depth: np.int64, layer: int) -> bool:
    steps = slot[SLOT_DEPTH] == depth + 1 or (slot[SLOT_DEPTH] == layer and depth == layer)
    follows: bool = slot[SLOT_LOWER] == lower and slot[SLOT_UPPER] == upper and steps
    return follows


@exact
def _write(slot: Ints, next_id: np.int64, feature: Ints) -> None:
    slot[NEXT_ID], slot[SLOT_DEPTH] = next_id, feature[DEPTH]
    slot[SLOT_LOWER], slot[SLOT_UPPER] = feature[LOWER], feature[UPPER]


@exact
def _read(
    slot: Ints, position: int, layer: int, ok: bool, lower: np.int64, upper: np.int64, depth: np.int64
) -> tuple[bool, np.int64, np.int64, np.int64]:
    """Add one slot to a chain. Takes (ok, lower, upper, depth) of the chain before the slot, and returns those of the
    chain after it."""
    if position > layer:
        ok = ok and _follows(slot, lower, upper, depth, layer)
    new_lower, new_upper = _advance(slot[SLOT_LOWER], slot[SLOT_UPPER], slot[NEXT_ID], position + 1)
    return ok, new_lower, new_upper, slot[SLOT_DEPTH]


@exact
def _leave(
    feature: Ints, position: int, ok: bool, lower: np.int64, upper: np.int64, depth: np.int64, hidden: Ints
) -> bool:
    """Write a slot's hidden state (4,). Return whether chain and feature were right."""
    ok = ok and feature[DEPTH] >= 0 and feature[POSITION] == position
    hidden[LOWER], hidden[UPPER], hidden[POSITION] = lower, upper, position + 1
    hidden[DEPTH] = depth + 1 if ok else BAD
    return ok


@exact
def _forward_chain(
    next_ids: Ints, features: Ints, first: int, pages: npt.NDArray[np.int32], slots: Ints, layer: int, hidden: Ints
) -> None:
    """Process one row's T tokens from slot `first`. The chain begins at slot `layer`."""
    page_size = slots.shape[1]
    ok, lower, upper, depth = True, np.int64(0), np.int64(0), np.int64(layer)
    for s in range(layer, first + next_ids.shape[0]):
        slot, t = slots[pages[s // page_size], s % page_size], s - first
        if t >= 0:
            _write(slot, next_ids[t], features[t])
        ok, lower, upper, depth = _read(slot, s, layer, ok, lower, upper, depth)
        if t >= 0:
            ok = _leave(features[t], s, ok, lower, upper, depth, hidden[t])


@exact
def _forward_window(
    next_ids: Ints,
    features: Ints,
    positions: Ints,
    nodes: Ints,
    visible: Ints,
    pages: npt.NDArray[np.int32],
    slots: Ints,
    layer: int,
    hidden: Ints,
) -> None:
    """Process one row's draft tree at slots `nodes`.

    Tokens read all slots before the tree, and visible slots of the tree.
    """
    page_size, first = slots.shape[1], window_begin(nodes, visible)
    ok, lower, upper, depth = True, np.int64(0), np.int64(0), np.int64(layer)
    for s in range(layer, first):
        slot = slots[pages[s // page_size], s % page_size]
        ok, lower, upper, depth = _read(slot, s, layer, ok, lower, upper, depth)
    for t in range(nodes.shape[0]):
        _write(slots[pages[nodes[t] // page_size], nodes[t] % page_size], next_ids[t], features[t])
        good, low, up, deep, s = ok, lower, upper, depth, first
        for node in range(first, nodes[t] + 1):
            if (visible[t] >> (node - first)) & 1:
                slot = slots[pages[node // page_size], node % page_size]
                good, low, up, deep = _read(slot, s, layer, good, low, up, deep)
                s += 1
        _leave(features[t], positions[t], good and s == positions[t] + 1, low, up, deep, hidden[t])


@exact
def _forward(
    next_ids: Ints,
    features: Ints,
    positions: Ints,
    nodes: Ints,
    visible: Ints,
    cu_q_lens: npt.NDArray[np.int32],
    page_table: npt.NDArray[np.int32],
    slots: Ints,
    layer: int,
    hidden: Ints,
) -> None:
    for row in range(cu_q_lens.shape[0] - 1):
        begin, end = cu_q_lens[row], cu_q_lens[row + 1]
        ids, given, pages, left = next_ids[begin:end], features[begin:end], page_table[row], hidden[begin:end]
        if begin < end and visible[begin] >= 0:
            places, own, seen = positions[begin:end], nodes[begin:end], visible[begin:end]
            _forward_window(ids, given, places, own, seen, pages, slots, layer, left)
        elif begin < end:
            _forward_chain(ids, given, nodes[begin], pages, slots, layer, left)


@exact
def _misses(hidden: Ints, hit_rate: int, out: npt.NDArray[np.bool_]) -> None:
    for n in range(hidden.shape[0]):
        out[n] = hidden[n, DEPTH] < 0 or not is_hit(hidden[n, POSITION] + 1, hit_rate)


class HashDraft:
    """A DraftHead on CPU tensors; `hit_rate` in percent.

    Layer 0 builds on the target's features. Layer i of an MTP stack builds on layer i - 1's hidden state, one slot
    before.
    """

    hidden_shape: tuple[int, ...] = (4,)
    hidden_dtype = torch.int64
    d2t: torch.Tensor | None = None

    def __init__(self, model: HashLM, hit_rate: int = 70, layer: int = 0) -> None:
        self.model = model
        self.hit_rate = hit_rate
        self.layer = layer
        self.weights_hash = f"hashdraft-1-{hit_rate}-{layer}"
        self._plane = f"draft{layer}"

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec(self._plane, (page_size, 4), torch.int64),)

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """Turn aux (T, 3), with columns lower sum, upper sum and position, into features (T, 4) at depth 0."""
        lower, upper, position = aux.unbind(dim=1)
        return torch.stack([lower, upper, torch.zeros_like(lower), position], dim=1)

    def extend(
        self,
        next_ids: torch.Tensor,
        aux: torch.Tensor,
        view: AttentionInputs,
        kv: KVPool,
        wanted: torch.Tensor | None = None,
    ) -> DraftOutput:
        hidden = self.states(next_ids, self.project(aux), view, kv)
        hidden = hidden if wanted is None else hidden[wanted]
        return DraftOutput(hidden, self.logits(hidden))

    def write(self, next_ids: torch.Tensor, aux: torch.Tensor, view: AttentionInputs, kv: KVPool) -> None:
        self.states(next_ids, self.project(aux), view, kv)

    def forward(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> DraftOutput:
        hidden = self.states(next_ids, features, view, kv)
        return DraftOutput(hidden, self.logits(hidden))

    def states(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> torch.Tensor:
        hidden = torch.full_like(features, BAD)
        visible = torch.full_like(view.positions, -1) if view.visible is None else view.visible
        _forward(
            next_ids.contiguous().numpy(),
            features.contiguous().numpy(),
            view.positions.contiguous().numpy(),
            view.key_slots.contiguous().numpy(),
            visible.contiguous().numpy(),
            view.layout.cu_q_lens.contiguous().numpy(),
            view.layout.page_table.contiguous().numpy(),
            kv.plane(self._plane).numpy(),
            self.layer,
            hidden.numpy(),
        )
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (N, vocab) of `hidden` (N, 4): the target's, or reversed after a miss or a broken chain."""
        states = hidden.contiguous().numpy()
        misses = np.empty(len(states), dtype=np.bool_)
        _misses(states, self.hit_rate, misses)
        logits = self.model.logits_of(np.ascontiguousarray(states[:, UPPER]).view(np.uint64))
        logits[torch.from_numpy(misses)] *= AVERSION
        return logits
