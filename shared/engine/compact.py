"""Make a verified tree's accepted path contiguous, so that later code sees a chain.

        slots    b  x  y  z  w         accepted b, y, w
        after    b  y  w  x  z         `committed` grows by 3; the next step overwrites the rest

This runs on the forward stream before publish, because code that reads a length also reads the KV up to this length.
"""

from __future__ import annotations

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import in_order
from shared.kv.pool import KVPool
from shared.model.math.interface import ModelOutput


def compact(fb: ForwardBatch, output: ModelOutput, order: torch.Tensor, kv: KVPool) -> None:
    """Reorder each window's nodes by `order` (D, width) int64.

    KV moves in all planes, and the tensors that draft-extend reads are reordered.
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
