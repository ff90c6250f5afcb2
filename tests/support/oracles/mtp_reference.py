"""DeepSeek-V3 and its MTP modules in plain torch, from the formulas of its technical report (arXiv 2412.19437): latent
attention of section 2.1.1, experts of 2.1.2, MTP modules of 2.2. Knows neither the library's code nor ours.

    h'(k) = M(k) [RMSNorm(h(k-1)); RMSNorm(Emb(next token))]     h(k) = block(h'(k))     draft k = best of OutHead(h(k))

h(0) is the main model's state; Emb and OutHead are its own. OutHead is only linear, so that a state is what lies
behind the last norm, which folders call shared_head.norm in a module. In folders the columns of M for the embedding
come first, as its name `eh_proj` says. The thin folders have one group of experts and no YaRN, so both are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Proposal:
    """The drafts after a text, and the float32 logits (num_drafts, vocab) that they are the best of."""

    ids: list[int]
    logits: torch.Tensor


@dataclass(frozen=True)
class DeepSeekV3:
    """A folder's float32 `tensors` by their published names, and the fields of its config.json."""

    tensors: dict[str, torch.Tensor]
    fields: dict[str, Any]

    @staticmethod
    def read(folder: Path) -> DeepSeekV3:
        fields = json.loads((folder / "config.json").read_text())
        assert fields["n_group"] == 1 and fields["rope_parameters"]["rope_type"] == "default"
        return DeepSeekV3(load_file(folder / "model.safetensors"), fields)

    def states(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the main model's states (T, H), h(0)."""
        x = self.embedded(ids)
        for number in range(self.fields["num_hidden_layers"]):
            x = self.block(f"model.layers.{number}", x)
        return self.norm("model.norm", x)

    def module(self, number: int, next_ids: Sequence[int], below: torch.Tensor) -> torch.Tensor:
        """Return MTP module `number`'s states (T, H), counted from 0. `below` (T, H): the states before it."""
        at = f"model.layers.{self.fields['num_hidden_layers'] + number}"
        token = self.norm(f"{at}.enorm", self.embedded(next_ids))
        joined = self.linear(f"{at}.eh_proj", torch.cat([token, self.norm(f"{at}.hnorm", below)], dim=-1))
        return self.norm(f"{at}.shared_head.norm", self.block(at, joined))

    def drafted_by_modules(self, ids: Sequence[int], states: torch.Tensor, num_drafts: int) -> Proposal:
        """Draft after `ids` with one module per draft. `states`: h(0) of all ids but the last."""
        next_ids, found = list(ids[1:]), []
        for number in range(num_drafts):
            states = self.module(number, next_ids, states)
            found.append(self.linear("lm_head", states[-1]))
            next_ids = [*next_ids[1:], int(found[-1].argmax())]
        return proposal_of(found)

    def drafted_by_one(self, ids: Sequence[int], states: torch.Tensor, num_drafts: int) -> Proposal:
        """Draft with the first module alone, as programs use V3's one: behind the text it reads its own states."""
        next_ids, below, found = list(ids[1:]), states, []
        for _ in range(num_drafts):
            own = self.module(0, next_ids, below)
            found.append(self.linear("lm_head", own[-1]))
            next_ids.append(int(found[-1].argmax()))
            below = torch.cat([states, own[len(states) - 1 :]])
        return proposal_of(found)

    def embedded(self, ids: Sequence[int]) -> torch.Tensor:
        return self.tensors["model.embed_tokens.weight"][list(ids)]

    # A transformer block

    def block(self, at: str, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(f"{at}.self_attn", self.norm(f"{at}.input_layernorm", x))
        x_normed = self.norm(f"{at}.post_attention_layernorm", x)
        has_experts = f"{at}.mlp.gate.weight" in self.tensors
        return x + (self.experts if has_experts else self.swiglu)(f"{at}.mlp", x_normed)

    def attention(self, at: str, x: torch.Tensor) -> torch.Tensor:
        fields, num_tokens = self.fields, len(x)
        heads, plain, turned = (
            fields[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        query_latent = self.norm(f"{at}.q_a_layernorm", self.linear(f"{at}.q_a_proj", x))
        query = self.linear(f"{at}.q_b_proj", query_latent).view(num_tokens, heads, plain + turned)
        latent, shared_key = self.linear(f"{at}.kv_a_proj_with_mqa", x).split([fields["kv_lora_rank"], turned], dim=-1)
        made = self.linear(f"{at}.kv_b_proj", self.norm(f"{at}.kv_a_layernorm", latent)).view(num_tokens, heads, -1)
        key, value = made[..., :plain], made[..., plain:]
        scores = torch.einsum("qhd,khd->hqk", query[..., :plain], key)
        scores = scores + torch.einsum(
            "qhd,kd->hqk", self.rotated(query[..., plain:]), self.rotated(shared_key[:, None])[:, 0]
        )
        later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        weights = (scores / (plain + turned) ** 0.5).masked_fill(later, float("-inf")).softmax(dim=-1)
        return self.linear(f"{at}.o_proj", torch.einsum("hqk,khd->qhd", weights, value).flatten(1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate neighbouring numbers of x (T, heads, D) as one complex number. Scores depend only on how far two
        tokens are apart, so a module's first token may be at 0."""
        size = x.shape[-1]
        speeds = self.fields["rope_parameters"]["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(len(x))[:, None] * speeds
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)

    def experts(self, at: str, x: torch.Tensor) -> torch.Tensor:
        affinity = self.linear(f"{at}.gate", x).sigmoid()
        biased = affinity + self.tensors[f"{at}.gate.e_score_correction_bias"]  # for the choice alone
        chosen = biased.topk(self.fields["num_experts_per_tok"]).indices
        gates = torch.zeros_like(affinity).scatter(1, chosen, affinity.gather(1, chosen))
        gates = gates / gates.sum(dim=-1, keepdim=True) * self.fields["routed_scaling_factor"]
        each = [self.swiglu(f"{at}.experts.{number}", x) for number in range(affinity.shape[1])]
        return self.swiglu(f"{at}.shared_experts", x) + torch.einsum("te,etd->td", gates, torch.stack(each))

    def swiglu(self, at: str, x: torch.Tensor) -> torch.Tensor:
        gate = self.linear(f"{at}.gate_proj", x)
        return self.linear(f"{at}.down_proj", gate * gate.sigmoid() * self.linear(f"{at}.up_proj", x))

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        size = (x.square().mean(dim=-1, keepdim=True) + self.fields["rms_norm_eps"]).sqrt()
        return x / size * self.tensors[f"{name}.weight"]


def proposal_of(logits: Sequence[torch.Tensor]) -> Proposal:
    return Proposal([int(each.argmax()) for each in logits], torch.stack(list(logits)))
