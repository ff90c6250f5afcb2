"""Run tensor parallelism inside a node: rank 0 decides, the other ranks follow.

    rank 0    scheduler, sockets, FutureMap, drafts, sampling     inputs ->|  forward  | barrier |  sampling ...
    rank 1    only its part of the model                               `-->|  forward  | barrier |  next inputs ...

Rank 0 sends the forward's inputs (ModelInputs) by value. A follower that planned or sampled by itself might
decide differently. All ranks share the pages' memory.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec
import torch

from shared.core.errors import RankLost
from shared.device.group import RankGroup
from shared.kv.pool import KVPool
from shared.model.math.interface import Model, ModelInputs, ModelOutput
from shared.ranks.orders import Forward, hear, tell

DTYPES = {str(dtype): dtype for dtype in (torch.int32, torch.int64)}


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
    """Send all fields but two, which only rank 0 needs: marks of layers, and lengths on the host."""
    sent = replace(inputs, layers=None, layout=replace(inputs.layout, host=None))
    return Forward(msgspec.msgpack.encode(sent, enc_hook=_packed))


def inputs_of(order: Forward) -> ModelInputs:
    return msgspec.msgpack.decode(order.inputs, type=ModelInputs, dec_hook=_unpacked)


def _packed(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def _unpacked(kind: type, packed: tuple[str, list[int], bytes]) -> torch.Tensor:
    """Return a fresh, writable tensor."""
    name, shape, data = packed
    flat = torch.frombuffer(bytearray(data), dtype=DTYPES[name]) if data else torch.empty(0, dtype=DTYPES[name])
    return flat.view(shape)
