"""After a tree was verified its accepted path is brought together, so that all that follows sees a chain.

        slots    b  x  y  z  w         accepted b, y, w
        after    b  y  w  x  z         committed + 3, and what lies behind is written again by the next step

Runs on the forward stream, before the new lengths are published: whoever reads lengths may read KV up to them.
Knows nothing of drafts and of acceptance.
"""

from __future__ import annotations

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import in_order
from shared.kv.pool import KVPool
from shared.model.interface import ModelOutput


def compact(fb: ForwardBatch, output: ModelOutput, order: torch.Tensor, kv: KVPool) -> None:
    """Puts every window's nodes in `order` (D, width) int64: their KV in every plane, and the step's rows that
    draft-extend reads: input ids, features and hidden states. The windows are chains from now on."""
    inputs, first = fb.inputs, fb.plan.num_prefill
    start = fb.committed[first:].unsqueeze(1)
    places = torch.arange(order.shape[1], device=order.device)
    kv.move_slots(inputs.page_table[first:], start + order[:, 1:], start + places[1:])  # node 0 is first in any order
    tokens = in_order(order, len(inputs.input_ids))
    inputs.input_ids = inputs.input_ids[tokens]
    if inputs.slots is not None:
        inputs.positions = inputs.slots
    inputs.slots = inputs.visible = None
    output.hidden = output.hidden[in_order(order, len(output.hidden))]
    if output.aux is not None:
        output.aux = output.aux[tokens]
