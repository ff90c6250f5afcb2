"""Compute the target's features over whole sequences, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shared.core.errors import ConfigError
from shared.model.config import LayerStyle, LlamaConfig
from shared.model.eagle_file import default_aux_layers
from shared.model.kernels import AS_DTYPE, library_kernels
from shared.model.weights import LayerWeights, TensorSource, load_weights

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Features of N tokens of consecutive sequences, in the target's dtype."""

    # (N, 3H): the residual stream before three layers, side by side, as a head reads it
    aux: Tensor
    final: Tensor  # (N, H): the hidden states after the last norm, as the target's head reads them


def check_plain(config: LlamaConfig) -> None:
    """Raise ConfigError for windows, experts or Gemma's special layers, which this forward pass lacks."""
    if config.windows or config.experts is not None or config.style != LayerStyle():
        why = "training supports no sliding windows, no experts and no layers like Gemma's"
        raise ConfigError(f"can't train heads for {config.name} ({config.family}): {why}")


class TargetNet:
    """The target, with its weights on the device. Calls leave no state behind."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device, max_context: int) -> None:
        check_plain(source.config)
        self.config = source.config
        self.dtype = dtype
        self.device = device
        make = library_kernels(source.config, dtype, device, AS_DTYPE).make_weight
        self._weights = load_weights(source, dtype, device, max_context, make, lambda weight: lambda hidden: hidden)
        head = "embed" if source.config.tie_embeddings else "head"
        self.embed = self._weights.embed  # (V, H)
        self.head = source.tensor(head).to(device, dtype)  # (V, H)
        self.rope = self._weights.rope
        # For an imported head, a caller may set the layers that this head reads.
        self.aux_layers: tuple[int, ...] = default_aux_layers(source.config.num_layers)
        self._content = source.content_hash()

    @property
    def identity(self) -> str:
        """A text that depends on all inputs of the features, except the token ids."""
        return f"{self._content} {self.dtype} {self.aux_layers}"

    @torch.inference_mode()
    def features(self, sequences: Sequence[Sequence[int]]) -> Features:
        lengths = [len(one) for one in sequences]
        ids = torch.tensor([token for one in sequences for token in one], device=self.device)
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        cos, sin = (table[positions].unsqueeze(1) for table in self.rope)
        residual = self.embed[ids].float()
        wanted, aux = self.aux_layers, []
        for index, layer in enumerate(self._weights.layers):
            if index in wanted:
                aux.append(residual.to(self.dtype, copy=True))  # a copy, since the next lines change the residual
            residual += layer.out(self._attend(layer, self._norm(residual, layer.attn_norm), cos, sin, lengths))
            assert layer.gate_up is not None and layer.down is not None
            gate, up = layer.gate_up(self._norm(residual, layer.mlp_norm)).chunk(2, dim=-1)
            residual += layer.down(F.silu(gate).mul_(up))
        return Features(torch.cat(aux, dim=-1), self._norm(residual, self._weights.norm))

    def _attend(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the attention's output, (N, heads * D)."""
        c = self.config
        heads = layer.qkv(x).view(len(x), -1, c.head_dim)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        parts = zip(q.split(list(lengths)), k.split(list(lengths)), v.split(list(lengths)), strict=True)
        return torch.cat([causal(*part) for part in parts])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = F.rms_norm(x.float(), weight.shape, weight, self.config.rms_eps)
        return normed.to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (N, heads, D) by (N, 1, D // 2) tables in float32.

    Value i of the first half and value i of the second half form a pair.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within one sequence. `q`: (n, heads, D), `k` and `v`: (n, kv_heads, D). Return (n, heads * D).

    For training sequences, two plain products are faster than the fused kernel on a CPU in bfloat16.
    """
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = (q * dim**-0.5).transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = (grouped @ k.permute(1, 2, 0)).view(kv_heads, -1, n, n).float()
    scores += torch.full((n, n), float("-inf"), device=q.device).triu_(1)
    shares = scores.softmax(dim=-1).to(v.dtype)
    out: Tensor = shares.view(kv_heads, -1, n) @ v.transpose(0, 1)
    return out.view(heads, n, dim).transpose(0, 1).reshape(n, heads * dim)
