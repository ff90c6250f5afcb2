"""Lay out a verify window before the target runs: each draft becomes a token with a slot and a position.

slot          L        L+1       L+2       L+3        node i at L + i, L = committed
position      L        L+1       L+1       L+2        by depth, if the window is a tree
            bonus       x         y         z         (z follows x)
"""

from __future__ import annotations

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import Drafts


def lay_out(fb: ForwardBatch, drafts: Drafts) -> None:
    """Write the drafts to the inputs, on the forward stream. A tree's tokens also get positions and visible slots."""
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
