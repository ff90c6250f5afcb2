"""Verify windows: a row's bonus token and its drafts, from what the grammar forces to what the target accepts.

Before the target runs, forced tokens replace drafts, and each draft becomes a token with a slot and a position. After
the verify, a tree's accepted path moves to the front of the window.
"""

from __future__ import annotations

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import Drafts, in_order
from shared.kv.pool import KVPool
from shared.model.math.interface import ModelOutput


def with_forced(fb: ForwardBatch, drafts: Drafts) -> Drafts:
    """Put the tokens that a grammar forces before the drafter's drafts, wherever earlier steps have brought the row.

    index of a token     p      p+1    p+2    p+3
    forced               f0     f1     f2              known to the host at the plan: p tokens were processed
    bonus, drafts               f1     f2     d3       the step before has drawn f0; d3 is the drafter's
    """
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


def lay_out(fb: ForwardBatch, drafts: Drafts) -> None:
    """Write the drafts to the inputs, on the forward stream. A tree's tokens also get positions and visible slots.

    slot          L        L+1       L+2       L+3        node i at L + i, L = committed
    position      L        L+1       L+1       L+2        by depth, if the window is a tree
                bonus       x         y         z         (z follows x)
    """
    inputs, num_chunk = fb.inputs, fb.num_chunk_tokens
    inputs.input_ids[num_chunk:].view(-1, fb.plan.width)[:, 1:] = drafts.ids
    if drafts.parents is None:
        return
    inputs.slots, inputs.positions = inputs.positions, inputs.positions.clone()
    depth = drafts.lineage.sum(dim=2) - 1
    inputs.positions[num_chunk:] = (fb.committed[fb.plan.num_prefill :].unsqueeze(1) + depth).view(-1)
    inputs.visible = torch.full_like(inputs.positions, -1)
    node = torch.arange(fb.plan.width, device=depth.device)
    inputs.visible[num_chunk:] = (drafts.lineage.to(torch.int64) << node).sum(dim=2).view(-1)


def counted_tokens(fb: ForwardBatch, drafts: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return History.common (E,) and History.drafted (E, width - 1) for the E outputs.

    Penalties at a node count the row's tokens up to the bonus token, then the drafts on the node's path.
    """
    num_rows, num_nodes, _ = drafts.lineage.shape
    common = fb.inputs.positions[fb.inputs.logits_idx] + 1
    first = len(common) - num_rows * num_nodes
    committed = fb.committed[fb.plan.num_prefill :]
    common[first:] = (committed + 1).repeat_interleave(num_nodes)
    drafted = torch.full((len(common), num_nodes - 1), -1, dtype=torch.int32, device=common.device)
    own = torch.where(drafts.lineage[:, :, 1:], drafts.ids.unsqueeze(1), -1)
    drafted[first:] = own.reshape(-1, num_nodes - 1).to(torch.int32)
    return common, drafted


def compact(fb: ForwardBatch, output: ModelOutput, order: torch.Tensor, kv: KVPool) -> None:
    """Make a verified tree's accepted path contiguous, so that later code sees a chain: put each window's nodes into
    `order` (D, width) int64.

        slots    b  x  y  z  w         accepted b, y, w
        after    b  y  w  x  z         `committed` grows by 3; the next step overwrites the rest

    KV moves in all planes, and the tensors that draft-extend reads are reordered. This runs on the forward stream
    before publish, because code that reads a length also reads the KV up to this length.
    """
    inputs, first = fb.inputs, fb.plan.num_prefill
    start = fb.committed[first:].unsqueeze(1)
    places = torch.arange(order.shape[1], device=order.device)
    for table in inputs.layout.page_tables:
        kv.move_slots(table[first:], start + order[:, 1:], start + places[1:])  # node 0 is first in any order
    tokens = in_order(order, len(inputs.input_ids))
    inputs.input_ids = inputs.input_ids[tokens]
    if inputs.slots is not None:
        inputs.positions = inputs.slots
    inputs.slots = inputs.visible = None
    output.hidden = output.hidden[in_order(order, len(output.hidden))]
    if output.aux is not None:
        output.aux = output.aux[tokens]
