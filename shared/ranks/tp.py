"""Run tensor parallelism inside a node: rank 0 decides, the other ranks follow.

    rank 0    scheduler, sockets, FutureMap, drafts, sampling     inputs ->|  forward  | barrier |  sampling ...
    rank 1    only its part of the model                               `-->|  forward  | barrier |  next inputs ...

Rank 0 sends the forward's inputs (ModelInputs) by value. A follower that planned or sampled by itself might
decide differently. All ranks share the pages' memory.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

import torch

from shared.core.errors import RankLost
from shared.device.group import RankGroup
from shared.kv.pool import KVPool
from shared.model.interface import Model, ModelInputs, ModelOutput
from shared.ranks.orders import Forward, hear, tell


class Ranks(Protocol):
    """Rank 0's side of a step, on the forward stream only."""

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """Run model.forward(inputs, kv) together with the other ranks.

        Raises RankLost on any failure, because the ranks may then be in different steps.
        """
        ...


class TPRanks:
    def __init__(self, group: RankGroup, followers: Sequence[socket.socket]) -> None:
        self._group = group
        self._followers = followers

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        order = order_of(inputs)
        for follower in self._followers:
            tell(follower, order)
        try:
            return together(self._group, model, inputs, kv)
        except RankLost:
            raise
        except Exception as error:
            raise out_of_step(error) from error


def follow_tp(orders: socket.socket, group: RankGroup, model: Model, kv: KVPool) -> None:
    """Obey TPRanks until rank 0 closes the socket between two steps."""
    with torch.inference_mode():
        while (order := hear(orders, Forward)) is not None:
            together(group, model, inputs_of(order), kv)


def together(group: RankGroup, model: Model, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
    """Run the same forward on every rank. After the barrier all ranks have written the last layer's KV.

    A step without outputs needs the barrier: it has no collective after that write.
    """
    output = model.forward(inputs, kv)
    group.barrier()
    return output


def out_of_step(error: Exception) -> RankLost:
    return RankLost(f"rank 0 failed where the others went on: {type(error).__name__}: {error}")


def order_of(inputs: ModelInputs) -> Forward:
    return Forward(
        input_ids=to_bytes(inputs.input_ids),
        positions=to_bytes(inputs.positions),
        cu_q_lens=to_bytes(inputs.cu_q_lens),
        page_table=to_bytes(inputs.page_table),
        num_pages=inputs.page_table.shape[1],
        logits_idx=to_bytes(inputs.logits_idx),
        max_q_len=inputs.max_q_len,
        max_seq_len=inputs.max_seq_len,
        slots=None if inputs.slots is None else to_bytes(inputs.slots),
        visible=None if inputs.visible is None else to_bytes(inputs.visible),
        adapters=None if inputs.adapters is None else to_bytes(inputs.adapters),
        encoder_lens=None if inputs.encoder_lens is None else to_bytes(inputs.encoder_lens),
    )


def inputs_of(order: Forward) -> ModelInputs:
    cu_q_lens = from_bytes(order.cu_q_lens, torch.int32)
    return ModelInputs(
        input_ids=from_bytes(order.input_ids),
        positions=from_bytes(order.positions),
        cu_q_lens=cu_q_lens,
        page_table=from_bytes(order.page_table, torch.int32).view(len(cu_q_lens) - 1, order.num_pages),
        logits_idx=from_bytes(order.logits_idx),
        max_q_len=order.max_q_len,
        max_seq_len=order.max_seq_len,
        slots=None if order.slots is None else from_bytes(order.slots),
        visible=None if order.visible is None else from_bytes(order.visible),
        adapters=None if order.adapters is None else from_bytes(order.adapters),
        encoder_lens=None if order.encoder_lens is None else from_bytes(order.encoder_lens),
    )


def to_bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a fresh, writable tensor."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
