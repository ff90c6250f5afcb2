"""Run data parallelism inside a node: each rank runs the whole model on some of a step's rows.

    step   | row 0 | row 1 | row 2 | row 3 |      one scheduler, one batch, one sampler: rank 0's
    rank 0 | row 0 | row 1 |
    rank 1                 | row 2 | row 3 |      outputs go back to rank 0, in row order.

In each step every follower gets one order, which may have no rows. At the end of the step, all ranks wait for each
other. A row may move to another rank at any step, at no cost: pages are in shared memory, and ranks keep no other
state.
"""

from __future__ import annotations

import socket
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from shared.core.errors import RankLost
from shared.device.group import RankGroup
from shared.kv.pool import KVPool
from shared.model.math.interface import Model, ModelInputs, ModelOutput
from shared.ranks.orders import Forward, hear, tell
from shared.ranks.tp import inputs_of, order_of, out_of_step


class DPRanks:
    def __init__(self, group: RankGroup, followers: Sequence[socket.socket]) -> None:
        self._group = group
        self._followers = followers

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        own, *others = deal(inputs, self._group.size)
        for follower, part in zip(self._followers, others, strict=True):
            tell(follower, order_of(part))
        try:
            first = model.forward(own, kv)
            rest = [self._receive(rank, part, first) for rank, part in enumerate(others, start=1)]
            self._group.barrier()
        except RankLost:
            raise
        except Exception as error:
            raise out_of_step(error) from error
        return joined([first, *rest])

    def _receive(self, rank: int, part: ModelInputs, like: ModelOutput) -> ModelOutput:
        num_outputs, num_tokens = len(part.logits_idx), len(part.input_ids)
        output = ModelOutput(
            logits=like.logits.new_empty(num_outputs, *like.logits.shape[1:]),
            hidden=like.hidden.new_empty(num_outputs, *like.hidden.shape[1:]),
            aux=None if like.aux is None else like.aux.new_empty(num_tokens, *like.aux.shape[1:]),
        )
        for tensor in tensors_of(output):
            self._group.receive(tensor, rank)
        return output


def follow_dp(orders: socket.socket, group: RankGroup, model: Model, kv: KVPool) -> None:
    """Obey DPRanks until rank 0 closes the socket between two steps."""
    with torch.inference_mode():
        while (order := hear(orders, Forward)) is not None:
            inputs = inputs_of(order)
            if len(inputs.input_ids):
                for tensor in tensors_of(model.forward(inputs, kv)):
                    group.send(tensor, 0)
            group.barrier()


def deal(inputs: ModelInputs, size: int) -> list[ModelInputs]:
    """Return each rank's part: neighbouring rows, with about equally many tokens.

    Rank 0 has the first row; other ranks may have no rows. Outputs stay in row order, as the engine needs.
    """
    bounds = inputs.layout.cu_q_lens.tolist()
    owners = [start * size // max(1, bounds[-1]) for start in bounds[:-1]]
    wanted = inputs.logits_idx.tolist()
    parts = []
    for rank in range(size):
        rows = slice(bisect_left(owners, rank), bisect_right(owners, rank))
        tokens = slice(bounds[rows.start], bounds[rows.stop])
        outputs = slice(bisect_left(wanted, tokens.start), bisect_left(wanted, tokens.stop))
        parts.append(part_of(inputs, rows, tokens, outputs))
    return parts


def part_of(inputs: ModelInputs, rows: slice, tokens: slice, outputs: slice) -> ModelInputs:
    bounds = inputs.layout.cu_q_lens[rows.start : rows.stop + 1] - tokens.start
    own: dict[str, Any] = {name: value[tokens] for name, value in inputs.per_token().items()}
    return ModelInputs(
        layout=inputs.layout.part(rows, cu_q_lens=bounds, host=None),
        logits_idx=inputs.logits_idx[outputs] - tokens.start,
        **own,
    )


def joined(parts: Sequence[ModelOutput]) -> ModelOutput:
    aux = [part.aux for part in parts if part.aux is not None]
    return ModelOutput(
        logits=torch.cat([part.logits for part in parts]),
        hidden=torch.cat([part.hidden for part in parts]),
        aux=torch.cat(aux) if aux else None,
    )


def tensors_of(output: ModelOutput) -> list[torch.Tensor]:
    """Return the nonempty tensors, in the order of sending."""
    tensors = (output.logits, output.hidden, output.aux)
    return [tensor for tensor in tensors if tensor is not None and tensor.numel()]
