"""Run T5 (Raffel et al. 2020, and v1.1's gated feed-forward) over paged KV, in plain torch.

    page slots of a row     | cross keys and values, one slot per encoder token | the decoder's own |
    decoder layer           norm -> self attention -> add | norm -> cross attention -> add | norm -> feed-forward -> add

The encoder runs in one step, and writes all cross keys and values to its tokens' slots. All layers of a stack use the
first layer's position biases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, linear, relu

from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.math.interface import ModelInputs, ModelOutput, ModelSpec

KV_PLANE = "kv"


@dataclass(frozen=True, slots=True)
class T5Config:
    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    inner_size: int
    num_encoder_layers: int
    num_decoder_layers: int
    num_buckets: int
    max_distance: int
    norm_eps: float
    is_gated: bool
    is_gelu: bool
    scales_outputs: bool  # whether outputs are multiplied by hidden_size ** -0.5 before the head
    eos_ids: tuple[int, ...]
    max_context: int


@dataclass(frozen=True, slots=True)
class Attention:
    """`q`, `k` and `v` are (heads * D, H), `out` is (H, heads * D)."""

    norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class FeedForward:
    norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor | None  # None without a gate
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class T5Layer:
    attention: Attention
    cross: Attention | None  # None in an encoder
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Stack:
    layers: tuple[T5Layer, ...]
    bias: torch.Tensor  # (num_buckets, heads)
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class T5Weights:
    embed: torch.Tensor  # (vocab, H)
    head: torch.Tensor  # (vocab, H)
    encoder: Stack
    decoder: Stack


class T5Model:
    """A Model in its weights' dtype, with float32 norms and softmax. Rows run one by one, which is simple but slow."""

    def __init__(self, config: T5Config, weights: T5Weights, weights_hash: str) -> None:
        self.config = config
        self._weights = weights
        self._dtype = weights.embed.dtype
        self.spec = ModelSpec(
            name="t5",
            vocab_size=config.vocab_size,
            max_context=config.max_context,
            dtype=str(self._dtype).removeprefix("torch."),
            weights_hash=weights_hash,
            eos_ids=config.eos_ids,
            has_encoder=True,
        )

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        config = self.config
        shape = (config.num_decoder_layers, 2, config.num_heads, page_size, config.head_dim)
        return (PlaneSpec(KV_PLANE, shape, self._dtype),)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """Return `hidden`: decoder states."""
        assert inputs.layout.encoder_lens is not None and inputs.visible is None
        hidden = torch.zeros(len(inputs.input_ids), self.config.hidden_size, dtype=self._dtype)
        encoding = {row: (begin, length) for row, begin, length in encoder_rows(inputs)}
        starts, lens = inputs.layout.cu_q_lens.tolist(), inputs.layout.encoder_lens.tolist()
        for row, length in enumerate(lens):
            begin, end = starts[row], starts[row + 1]
            slots = RowSlots(kv, inputs.layout.page_table[row])
            if row in encoding:
                self._encode(inputs.input_ids[begin : begin + length], slots)
                begin += length
            if begin < end:
                first = int(inputs.positions[begin])
                hidden[begin:end] = self._decode(inputs.input_ids[begin:end], first, length, slots)
        wanted = hidden[inputs.logits_idx]
        return ModelOutput(logits=self._logits(wanted), hidden=wanted)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = self.config.hidden_size**-0.5 if self.config.scales_outputs else 1.0
        return linear(hidden * scale, self._weights.head).float()

    def _encode(self, ids: torch.Tensor, slots: RowSlots) -> None:
        """Write all decoder layers' cross keys and values at these tokens' positions."""
        stack, residual = self._weights.encoder, self._weights.embed[ids]
        places = torch.arange(len(ids))
        bias = self._bias(stack, places, places, bidirectional=True)
        for layer in stack.layers:
            normed = self._norm(residual, layer.attention.norm)
            keys, values = self._keys_values(layer.attention, normed)
            residual = residual + self._attend(layer.attention, normed, keys, values, bias)
            residual = residual + self._feed_forward(layer.feed_forward, residual)
        encoded = self._norm(residual, stack.norm)
        for index, layer in enumerate(self._weights.decoder.layers):
            assert layer.cross is not None
            slots.write(index, 0, *self._keys_values(layer.cross, encoded))

    def _decode(self, ids: torch.Tensor, first: int, encoder_len: int, slots: RowSlots) -> torch.Tensor:
        """Return (n, H) for ids (n,). `first`: the first id's position."""
        stack, residual, end = self._weights.decoder, self._weights.embed[ids], first + len(ids)
        queries, keys_at = torch.arange(first, end), torch.arange(encoder_len, end)
        bias = self._bias(stack, queries, keys_at, bidirectional=False)
        bias = bias.masked_fill(keys_at[None, None] > queries[None, :, None], -math.inf)
        for index, layer in enumerate(stack.layers):
            assert layer.cross is not None
            normed = self._norm(residual, layer.attention.norm)
            slots.write(index, first, *self._keys_values(layer.attention, normed))
            own = slots.read(index, encoder_len, end)
            residual = residual + self._attend(layer.attention, normed, *own, bias)
            normed = self._norm(residual, layer.cross.norm)
            residual = residual + self._attend(layer.cross, normed, *slots.read(index, 0, encoder_len), None)
            residual = residual + self._feed_forward(layer.feed_forward, residual)
        return self._norm(residual, stack.norm)

    def _keys_values(self, attention: Attention, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, (heads, n, D) each, of `source` (n, H)."""
        return self._heads(linear(source, attention.k)), self._heads(linear(source, attention.v))

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(len(flat), self.config.num_heads, self.config.head_dim).transpose(0, 1)

    def _attend(
        self,
        attention: Attention,
        normed: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with `bias` (heads, n, m). Scores are not scaled, as in T5's training."""
        scores = (self._heads(linear(normed, attention.q)) @ keys.transpose(1, 2)).float()
        if bias is not None:
            scores = scores + bias
        mixed = scores.softmax(dim=-1).to(self._dtype) @ values
        return linear(mixed.transpose(0, 1).reshape(len(normed), -1), attention.out)

    def _feed_forward(self, block: FeedForward, residual: torch.Tensor) -> torch.Tensor:
        normed = self._norm(residual, block.norm)
        inner = linear(normed, block.gate)
        inner = gelu(inner, approximate="tanh") if self.config.is_gelu else relu(inner)
        if block.up is not None:
            inner = inner * linear(normed, block.up)
        return linear(inner, block.down)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        squares = hidden.float().pow(2).mean(dim=-1, keepdim=True)
        return (hidden * torch.rsqrt(squares + self.config.norm_eps)).to(self._dtype) * weight

    def _bias(self, stack: Stack, queries: torch.Tensor, keys: torch.Tensor, bidirectional: bool) -> torch.Tensor:
        distance = keys[None] - queries[:, None]
        buckets = bucket_of(distance, self.config.num_buckets, self.config.max_distance, bidirectional)
        return stack.bias[buckets].permute(2, 0, 1).float()


def bucket_of(distance: torch.Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """Map key position minus query position to a bucket.

    Half of the buckets have one distance each; the other buckets widen logarithmically, up to max_distance.
    `bidirectional`: whether later keys have buckets of their own.
    """
    base = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        base = (distance > 0).long() * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (share * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return base + torch.where(distance < exact, distance, far)


class RowSlots:
    """Finds one row's slots by position, through its page table (P,) int32."""

    def __init__(self, kv: KVPool, pages: torch.Tensor) -> None:
        self._plane = kv.plane(KV_PLANE)  # (num_pages, layers, 2, heads, page_size, D)
        self._pages = pages.long()
        self._page_size = kv.page_size

    def write(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values, (heads, n, D) each. `first`: their first position."""
        pages, slots = self._at(first, first + keys.shape[1])
        self._plane[pages, layer, 0, :, slots] = keys.transpose(0, 1)
        self._plane[pages, layer, 1, :, slots] = values.transpose(0, 1)

    def read(self, layer: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, (heads, end - first, D) each."""
        pages, slots = self._at(first, end)
        keys, values = (self._plane[pages, layer, kind, :, slots] for kind in (0, 1))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _at(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(first, end)
        return self._pages[positions // self._page_size], positions % self._page_size


def encoder_rows(inputs: ModelInputs) -> list[tuple[int, int, int]]:
    """Return (row, first token, number of encoder tokens) for each row with encoder input.

    Raises ValueError if a step has only a part of an input, because all tokens of an input read each other.
    """
    assert inputs.layout.encoder_lens is not None
    found = []
    starts, lens = inputs.layout.cu_q_lens.tolist(), inputs.layout.encoder_lens.tolist()
    for row, length in enumerate(lens):
        begin, end = starts[row], starts[row + 1]
        first = int(inputs.positions[begin]) if begin < end else length
        if first >= length:
            continue
        if first > 0 or end - begin < length:
            raise ValueError(f"row {row}: positions {first} to {first + end - begin - 1} of {length} encoder tokens")
        found.append((row, begin, length))
    return found
