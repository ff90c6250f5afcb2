"""The EAGLE-3 draft network (arXiv 2503.01840) over whole sequences, unrolled as in serving (training-time test).

Slot j of a sequence holds the token at j + 1 and the feature of position j, and predicts the token at j + 2. At step 0
the feature is `fc`'s output for three hidden states of the target. At step k the feature is the output of step k - 1 at
the previous slot, as when the head drafts its k-th token. Weights are float32 masters under their public names.
Matrix products run in `dtype`.

A query at step k and slot i sees the step-0 keys of slots up to i - k, and one key of each later step of its chain:

  slot     i-2   i-1    i
  step 0    x                  chain of the query at step 2, slot i
  step 1          x
  step 2                x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deploy.tools.head.store import FeatureTrace
from deploy.tools.head.target import rotate
from shared.model.config import LlamaConfig

Tensor = torch.Tensor
Weights = Mapping[str, Tensor]
Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """Indices that find several sequences' slots in a step's flat rows.

    Step 0 has keys of all slots. Step k's output rows begin k slots after each answer's first slot.
    """

    slots: Tensor  # (N,) indices into all tokens: the slots whose predicted token is known.
    starts: Tensor  # (M,) indices into `slots`: the slots of step 0's outputs.
    lengths: tuple[int, ...]  # number of slots of each sequence
    firsts: tuple[int, ...]  # first output slot of each sequence

    def counts(self, step: int) -> tuple[int, ...]:
        return tuple(length - first - step for length, first in zip(self.lengths, self.firsts, strict=True))


def rows_of(traces: Sequence[FeatureTrace]) -> Rows:
    slots, starts, base, start = [], [], 0, 0
    for one in traces:
        length = len(one.ids) - 2
        slots.append(torch.arange(base, base + length))
        starts.append(torch.arange(start + one.prompt - 1, start + length))
        base, start = base + len(one.ids), start + length
    lengths = tuple(len(one.ids) - 2 for one in traces)
    return Rows(torch.cat(slots), torch.cat(starts), lengths, tuple(one.prompt - 1 for one in traces))


def drop_firsts(values: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.cat([part[1:] for part in values.split(list(counts))])


def drop_lasts(values: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.cat([part[:-1] for part in values.split(list(counts))])


class HeadNet:
    """`embed` (V, H): the target's embedding. `rope`: the head's rotary tables. Weights are passed to each call."""

    def __init__(self, layer: LlamaConfig, embed: Tensor, rope: Rope, dtype: torch.dtype) -> None:
        self.layer = layer
        self.dtype = dtype
        self._embed = embed
        self._rope = rope

    def unroll(self, weights: Weights, traces: Sequence[FeatureTrace], steps: int) -> list[Tensor]:
        """Return `lm_head`'s inputs in the order of Rows: (M_k, H) per step k.

        They are differentiable in the weights.
        """
        rows, chain = rows_of(traces), Chain(self.layer)
        ids = torch.cat([one.ids for one in traces]).to(self._embed.device)
        aux = torch.cat([one.aux for one in traces]).to(ids.device)[rows.slots]
        feature = self._product(aux, weights["fc.weight"]).float()
        positions = torch.cat([torch.arange(n, device=ids.device) for n in rows.lengths])
        keys, values = self._keys(weights, self._input(weights, ids[rows.slots + 1], feature), positions)
        chain.begin(keys, values, rows)
        outputs, where, feature = [], rows.starts, feature[rows.starts]
        for step in range(steps):
            counts = rows.counts(step)
            x = self._input(weights, ids[rows.slots[where] + 1], feature)
            if step:
                chain.extend(*self._keys(weights, x, positions[where]), counts)
            query = self._rotated(self._product(x, weights["midlayer.self_attn.q_proj.weight"]), positions[where])
            feature = self._rest(weights, feature, chain.attend(query, counts))
            outputs.append(self._norm(feature, weights["norm.weight"]))
            where, feature = drop_firsts(where, counts), drop_lasts(feature, counts)
        return outputs

    def _input(self, weights: Weights, tokens: Tensor, feature: Tensor) -> Tensor:
        """Return the layer's input: (M, 2H)."""
        embedded = self._norm(self._embed[tokens], weights["midlayer.input_layernorm.weight"])
        return torch.cat([embedded, self._norm(feature, weights["midlayer.hidden_norm.weight"])], dim=-1)

    def _keys(self, weights: Weights, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values: (M, kv_heads, D) each."""
        keys = self._rotated(self._product(x, weights["midlayer.self_attn.k_proj.weight"]), positions)
        values = self._product(x, weights["midlayer.self_attn.v_proj.weight"])
        return keys, values.view(keys.shape)

    def _rest(self, weights: Weights, feature: Tensor, attended: Tensor) -> Tensor:
        """Return (M, H) float32: the residual stream, which is the next step's feature."""
        residual = feature + self._product(attended, weights["midlayer.self_attn.o_proj.weight"])
        normed = self._norm(residual, weights["midlayer.post_attention_layernorm.weight"])
        gate = self._product(normed, weights["midlayer.mlp.gate_proj.weight"])
        up = self._product(normed, weights["midlayer.mlp.up_proj.weight"])
        return residual + self._product(F.silu(gate) * up, weights["midlayer.mlp.down_proj.weight"])

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return `x` with rotary positions: (M, heads, D)."""
        cos, sin = (table[positions].unsqueeze(1) for table in self._rope)
        return rotate(x.view(len(x), -1, self.layer.head_dim), cos, sin)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), weight.to(self.dtype))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = F.rms_norm(x.float(), weight.shape, weight, self.layer.rms_eps)
        return normed.to(self.dtype)


class Chain:
    """Hold the keys and values of all steps so far, and attend over them.

    Row r of a sequence belongs to the chain that begins at slot `first + r`, where `first` is the sequence's first
    output slot. The row sees the first `first + r + 1` keys of step 0, and the r-th key of each later step.
    """

    def __init__(self, layer: LlamaConfig) -> None:
        self._layer = layer
        self._first: list[tuple[Tensor, Tensor]] = []  # by sequence: step 0's keys and values, (slots, kv_heads, D)
        self._first_slots: tuple[int, ...] = ()
        # by later step and sequence: the step's keys and values, (count, kv_heads, D)
        self._later: list[list[tuple[Tensor, Tensor]]] = []

    def begin(self, keys: Tensor, values: Tensor, rows: Rows) -> None:
        lengths = list(rows.lengths)
        self._first = list(zip(keys.split(lengths), values.split(lengths), strict=True))
        self._first_slots = rows.firsts

    def extend(self, keys: Tensor, values: Tensor, counts: Sequence[int]) -> None:
        parts = list(counts)
        self._later.append(list(zip(keys.split(parts), values.split(parts), strict=True)))

    def attend(self, query: Tensor, counts: Sequence[int]) -> Tensor:
        """Attend with the query (M, heads, D). Return (M, heads * D)."""
        return torch.cat([self._attend_one(n, part) for n, part in enumerate(query.split(list(counts)))])

    def _attend_one(self, n: int, query: Tensor) -> Tensor:
        count, heads, dim = query.shape
        first, kv_heads = self._first_slots[n], self._layer.num_kv_heads
        keys, values = (part[: first + count].transpose(0, 1) for part in self._first[n])
        q = (query * dim**-0.5).transpose(0, 1).reshape(kv_heads, -1, dim)  # (kv, group * count, D)
        scores = (q @ keys.transpose(1, 2)).view(kv_heads, -1, count, first + count).float()
        ahead = torch.full((count, first + count), float("-inf"), device=q.device).triu_(first + 1)
        own = [self._own(step[n], count) for step in self._later]
        grouped = q.view(kv_heads, -1, count, dim)
        beside = [(grouped * k).sum(-1, dtype=torch.float32).unsqueeze(-1) for k, _ in own]
        shares = torch.cat([scores + ahead, *beside], dim=-1).softmax(dim=-1).to(values.dtype)
        seen, *alone = shares.split([first + count, *(1 for _ in own)], dim=-1)
        out: Tensor = (seen.reshape(kv_heads, -1, first + count) @ values).view(grouped.shape)
        for share, (_, v) in zip(alone, own, strict=True):
            out = out + share * v
        return out.view(heads, count, dim).transpose(0, 1).reshape(count, heads * dim)

    def _own(self, step: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of `step`, (kv_heads, 1, count, D) each. Leave out chains that end before the
        query's step."""
        keys, values = step
        return keys[:count].transpose(0, 1).unsqueeze(1), values[:count].transpose(0, 1).unsqueeze(1)
