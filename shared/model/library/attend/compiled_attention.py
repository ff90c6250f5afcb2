"""Our kernels for a CPU, on the pages of models whose layers are the library's. Importing this imports numba."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from shared.kernel.attention.attend_tokens import TokenAttention, TokenHeads, TokenPages, TokenScoring, supports
from shared.kernel.attention.attention import PADDED_MAX_Q, AttentionInputs
from shared.kernel.product.libraries import has_amx
from shared.kernel.team.team import Team
from shared.model.library.attend.layer_pages import PagesOfLayer
from shared.model.library.attend.layer_places import LayerShape, Scoring


def kernels_know(layers: Iterable[LayerShape]) -> bool:
    """Return whether the kernels compute attention in all of these layers."""
    return all(
        supports(layer.key_size, layer.value_size)
        and layer.dtype in (torch.float32, torch.bfloat16)
        and layer.latent is None
        and not (layer.num_chosen or layer.in_chunks)
        for layer in layers
    )


class CompiledAttention:
    """`begin` starts a step. Code for a kind of heads is compiled when the first such layer attends: in the check."""

    def __init__(self, team: Team, has_window: bool) -> None:
        """`has_window`: whether any layer has one, or unread keys."""
        self._team, self._has_window = team, has_window
        self._kinds: dict[tuple[TokenHeads, int], TokenAttention] = {}
        self._begun: set[tuple[TokenHeads, int]] = set()  # in this step

    def begin(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs
        self._begun.clear()

    @property
    def may_leave_step(self) -> bool:
        """Return whether torch attends in some layers of this step: torch's own attention multiplies by AMX, which
        takes half the time for a chunk of a prompt."""
        return self._inputs.layout.max_q_len > PADDED_MAX_Q and has_amx()

    def leaves_layer(self, dtype: torch.dtype, scoring: Scoring) -> bool:
        return self.may_leave_step and scoring.is_plain and dtype == torch.bfloat16

    def attend(
        self, pages: PagesOfLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Write a layer's keys and values, then attend: return (T, heads, value_size).

        q (T, heads, key_size), k and v (T, kv_heads, size)."""
        own = token_pages(pages)
        layer = pages.layer
        asked = TokenScoring(scoring.scale, layer.window, scoring.softcap or 0.0, scoring.sinks, layer.num_unread)
        return self._of_kind(pages, q, own, scoring).attend(q, k, v, own, asked)

    def _of_kind(self, pages: PagesOfLayer, q: torch.Tensor, own: TokenPages, scoring: Scoring) -> TokenAttention:
        layer = pages.layer
        sizes = q.shape[1], layer.num_kv_heads, layer.key_size, layer.value_size
        terms = scoring.softcap is not None, scoring.sinks is not None
        kind = TokenHeads(*sizes, q.dtype, own.keys.dtype, self._has_window, *terms), pages.group
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = TokenAttention(kind[0], self._team)
        if kind not in self._begun:
            inputs = self._inputs
            found.begin(replace(inputs, layout=inputs.layout.of_group(pages.group)), own.sizes())
            self._begun.add(kind)
        return found


def token_pages(pages: PagesOfLayer) -> TokenPages:
    layer = pages.layer
    keys, values = pages.planes[0], pages.planes[-1]
    if len(pages.planes) == 1:
        keys, values = keys.split((layer.num_kv_heads * layer.key_size, layer.num_kv_heads * layer.value_size), dim=2)
    scales = (None, None) if pages.scales is None else pages.scales.split(layer.num_kv_heads, dim=2)
    return TokenPages(keys, values, *scales)
