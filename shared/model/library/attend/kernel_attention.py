"""Our kernels for a GPU, on the pages of models whose layers are the library's. Importing this imports Triton."""

from __future__ import annotations

import torch

from shared.gpu_kernel.attention import MOST_DIM, attend_rows, packed, parted
from shared.gpu_kernel.paged_step import Layer
from shared.gpu_kernel.places import find_places
from shared.kernel.attention.attention import AttentionInputs
from shared.model.library.attend.layer_pages import PagesOfLayer
from shared.model.library.attend.layer_places import LayerShape, Scoring


def kernels_know(layer: LayerShape) -> bool:
    """Return whether the kernels compute attention with heads of these sizes."""
    if layer.num_unread or layer.num_chosen or layer.in_chunks:
        return False
    return layer.latent is None and layer.key_size == layer.value_size <= MOST_DIM


class KernelStep:
    """One step's rows, and its tokens' places: all layers share them."""

    def __init__(self, inputs: AttentionInputs, page_size: int) -> None:
        inputs = packed(inputs)
        layout, self._page_size = inputs.layout, page_size
        self._parts = parted(inputs)
        self._places = find_places(inputs.key_slots, inputs.visible, layout.cu_q_lens, layout.page_table, page_size)

    def found(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's page, and its slot there, (T,) int64. Tokens behind the last row get the sink page."""
        return self._places.page.long(), (self._places.slot % self._page_size).long()

    def attend(self, pages: PagesOfLayer, queries: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Return (T, heads, D). queries: (T, heads, D), rotated. Keys and values are in their pages already."""
        layer = pages.layer
        (numbers,) = pages.planes
        of = Layer.of_tokens(
            numbers,
            pages.scales,
            layer.num_kv_heads,
            layer.window,
            scoring.scale,
            scoring.softcap or 0.0,
            scoring.sinks,
        )
        return attend_rows(queries.contiguous(), of, self._parts, self._places)
