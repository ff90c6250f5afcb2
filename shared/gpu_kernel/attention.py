"""Compute attention over paged KV on a GPU, with the interface of shared/kernel/attention/attention.py.

    begin   one launch: each token's places
    attend  rotate q and k, write k and v -> short windows (split the keys, merge the results) and prompt chunks

The host never waits for the device: it sizes the grids by upper bounds of the lengths, and the kernels read the exact
lengths.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shared.gpu_kernel.paged_attention import attend_windows
from shared.gpu_kernel.paged_step import Layer, Rows
from shared.gpu_kernel.places import Places, find_places
from shared.gpu_kernel.prefill_attention import attend_chunks
from shared.gpu_kernel.rope_write import rope_write
from shared.kernel.attention.attention import AttentionInputs, AttentionShape, RopeTables, page_hadamard

MOST_DIM = 256  # largest head_dim
MOST_WINDOW = 16  # with more tokens, a row's queries alone fill the chip, so its keys are not split


class TritonAttention:
    gathers = False

    def __init__(
        self,
        shape: AttentionShape,
        tables: RopeTables,
        local_tables: RopeTables | None = None,
        *,
        is_fixed: bool = False,
    ) -> None:
        """`is_fixed`: the choice of a row's kernel must not depend on the step's other rows."""
        self._shape, self._is_fixed = shape, is_fixed
        self._tables, self._local_tables = tables, local_tables or tables

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        inputs = packed(inputs)
        self._inputs, self._kv, self._scales = inputs, kv, scales
        self._size = page_hadamard(self._shape, kv.dtype)
        layout = inputs.layout
        self._places = [
            find_places(inputs.key_slots, inputs.visible, layout.cu_q_lens, table, page_size=kv.shape[4])
            for table in layout.page_tables
        ]
        self._parts = [
            parted(replace(inputs, layout=layout.of_group(group)), self._is_fixed)
            for group in range(len(layout.page_tables))
        ]

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        q, (group, _) = self.write(layer, qkv, q_norm, k_norm), self._shape.place(layer)
        return attend_rows(q, self._layer(layer), self._parts[group], self._places[group]).flatten(1)

    def write(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Rotate q and k, and write keys and values to their pages. Return q, (T, heads, D)."""
        of, shape, (group, _) = self._layer(layer), self._shape, self._shape.place(layer)
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        tables = self._local_tables if of.window else self._tables
        return rope_write(
            qkv, norms, shape.eps, tables, self._inputs.positions, self._places[group], shape.num_heads,
            of.kv, of.scales, self._size,
        )  # fmt: skip

    def _layer(self, layer: int) -> Layer:
        _, slot = self._shape.place(layer)
        scales = None if self._scales is None else self._scales[:, slot]
        return Layer(self._kv[:, slot], scales, self._shape.window(layer), self._shape.score_scale)


def attend_rows(q: torch.Tensor, layer: Layer, parts: tuple[Rows, Rows], places: Places) -> torch.Tensor:
    """Return (T, heads, D) of a step whose rows are in `parts`: prompt chunks, then short windows.

    q (T, heads, D) is contiguous and rotated, and the tokens' keys and values are in their pages."""
    chunks, windows = parts
    out = torch.empty_like(q)
    if chunks.num_rows:
        attend_chunks(q, out, layer, chunks, places)
    if windows.num_rows:
        attend_windows(q, out, layer, windows, places)
    return out


def packed(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with contiguous tensors. Equal positions may be one number's expanded view."""
    return replace(
        inputs,
        positions=inputs.positions.contiguous(),
        layout=inputs.layout.with_arrays({name: one.contiguous() for name, one in inputs.layout.arrays().items()}),
        slots=None if inputs.slots is None else inputs.slots.contiguous(),
        visible=None if inputs.visible is None else inputs.visible.contiguous(),
    )


def parted(inputs: AttentionInputs, is_fixed: bool = False) -> tuple[Rows, Rows]:
    """Split the step's rows into prompt chunks and short windows.

    With `is_fixed`, a short chunk stays a chunk, because the kernels of chunks and windows sum in different orders."""
    num_tokens, num_rows, host = len(inputs.positions), len(inputs.layout.page_table), inputs.layout.host
    num_chunks = chunk_tokens = 0
    if host is not None and (is_fixed or inputs.layout.max_q_len > MOST_WINDOW):
        num_chunks = num_rows - host.num_running
        chunk_tokens = int(host.cu_q_lens[num_chunks])
    elif inputs.layout.max_q_len > MOST_WINDOW and inputs.visible is None:
        num_chunks, chunk_tokens = num_rows, num_tokens
    num_windows = num_rows - num_chunks
    longest = inputs.layout.max_q_len
    if num_chunks and num_windows:  # all windows have the same width
        longest = (num_tokens - chunk_tokens) // num_windows
    bounds, table, most = inputs.layout.cu_q_lens, inputs.layout.page_table, inputs.layout.max_seq_len
    return (
        Rows(bounds, table, None, 0, num_chunks, 0, chunk_tokens, inputs.layout.max_q_len, most),
        Rows(
            bounds,
            table,
            inputs.visible,
            num_chunks,
            num_windows,
            chunk_tokens,
            num_tokens - chunk_tokens,
            longest,
            most,
        ),
    )
