"""The attention of the library's layers on a GPU. The host knows only bounds of the lengths, and never waits.

what our kernels know              kernel_attention.py, on the same pages
values of another size,            torch gathers as many keys of each row as the host's bound allows, and hides
  very wide heads                  the keys that a query doesn't read
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shared.kernel.attention.attention import AttentionInputs
from shared.kv.pool import KVPool
from shared.model.library.attend.attention import PagedAttention
from shared.model.library.attend.layer_pages import PagesOfLayer, ReadKeys
from shared.model.library.attend.layer_places import LayerShape, ModelPlaces, Scoring
from shared.model.library.attend.step_rows import StepRows, joined_rows
from shared.model.math.interface import LayerMarks

if TYPE_CHECKING:
    from shared.model.library.attend.kernel_attention import KernelStep


class DeviceAttention(PagedAttention):
    """The lengths of its StepRows are bounds."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str = "auto",
        places: ModelPlaces | None = None,
        *,
        use_kernels: bool,
        called: Sequence[int] | None = None,
    ) -> None:
        """`use_kernels`: where they know a layer. Else torch attends in all of them."""
        super().__init__(layers, kv_dtype, places, called=called)
        self._by_kernels: frozenset[LayerShape] = frozenset()
        if use_kernels:
            from shared.model.library.attend.kernel_attention import kernels_know

            self._by_kernels = frozenset(filter(kernels_know, layers))
        self.gathers = not self._by_kernels.issuperset(layers)
        self._kernel_steps: list[KernelStep] = []  # one per page group

    @property
    def needs_cpu_seq_lens(self) -> bool:
        return False

    def begin(self, inputs: AttentionInputs, kv: KVPool, marks: LayerMarks | None = None) -> None:
        if self._by_kernels:
            from shared.model.library.attend.kernel_attention import KernelStep

            groups = range(len(self.places.windows))
            self._kernel_steps = [
                KernelStep(replace(inputs, layout=inputs.layout.of_group(group)), kv.page_size) for group in groups
            ]
        super().begin(inputs, kv, marks)

    def _attend_all(self, pages: PagesOfLayer, queries: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        if pages.layer in self._by_kernels:
            return self._kernel_steps[pages.group].attend(pages, queries, scoring)
        return super()._attend_all(pages, queries, scoring)

    def _rows_of(self, inputs: AttentionInputs) -> list[StepRows]:
        if not self.gathers:
            return []
        host = inputs.layout.host
        assert host is not None, "no rank of --dp has a GPU"
        bounds = host.cu_q_lens.tolist()
        if host.seq_lens is not None:
            return joined_rows(bounds, host.seq_lens.tolist())
        most = inputs.layout.max_seq_len
        return joined_rows(bounds, [most - (stop - start) for start, stop in zip(bounds, bounds[1:], strict=False)])

    def _find_places(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernel_steps[group].found() if self._by_kernels else super()._find_places(group)

    def _find_keys(self, rows: StepRows, layer: LayerShape, group: int, dtype: torch.dtype) -> ReadKeys:
        window, num_rows, most = layer.window, len(rows.lengths), max(rows.lengths)
        num = min(most, window + rows.num_queries - 1) if window else most
        own = self._inputs.key_slots[rows.start : rows.stop].view(num_rows, -1)
        first = (own[:, :1] + 1 - window).clamp(min=0) if window else torch.zeros_like(own[:, :1])
        read = (first + torch.arange(num, device=own.device)).minimum(own[:, -1:])
        table = self._inputs.layout.page_tables[group][rows.first : rows.first + num_rows].long()
        pages, slots = table.gather(1, read // self._page_size), read % self._page_size
        return ReadKeys(pages, slots, self._mask_of(rows, layer, first, num, dtype))
