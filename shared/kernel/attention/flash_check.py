"""Compare FlashInfer's attention with our reference on a device. Before this has passed, `auto` does not take it.

The largest difference covers prompt chunks, decode rows and windows of several tokens, beside each other and alone, and
graphs that are replayed with other lengths than those of their capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from shared.device.gpu import Gpu
from shared.kernel.attention.attention import AttentionInputs, AttentionShape, TorchAttention
from shared.kernel.attention.flash_infer import DTYPES, FlashInferAttention
from shared.kernel.attention.rope import inverse_frequencies, rope_tables
from shared.kernel.code.step_layout import HostLengths, Layout, equal_bounds

MOST_DIFFERENCE = 3e-2  # of results around 1: bfloat16 rounds the weights of keys, too
# both widths of heads; groups that decode on ordinary cores and on tensor cores
SHAPES = (AttentionShape(4, 2, 64, 1e-5), AttentionShape(8, 1, 128, 1e-5))
PAGE_SIZE, LAYERS, LAYER = 16, 2, 1
MOST_TOKENS = 640  # of a row
GRAPH_ROWS = 4
WIDTHS = (1, 4)
THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class TrialRows:
    """A step's rows: tokens before it, tokens in it, and how many of them decode."""

    befores: tuple[int, ...]
    q_lens: tuple[int, ...]
    num_running: int

    @property
    def bounds(self) -> np.ndarray:
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.q_lens))).astype(np.int32)

    @property
    def host(self) -> HostLengths:
        return HostLengths(self.bounds, np.array(self.befores, np.int64), self.num_running)


STEPS = (
    TrialRows((0, 40, 300), (70, 5, 33), 0),
    TrialRows((20, 513, 31), (17, 1, 1), 2),
    TrialRows((0, 100, 7), (40, 4, 4), 2),
    TrialRows((600, 15, 0), (1, 1, 1), 3),
    TrialRows((600, 12, 47), (4, 4, 4), 3),
)
REPLAYED = ((5, 600, 47), (0, 16, 301), (31,))  # tokens before the steps that one graph runs


def compare_attention(gpu: Gpu, device: torch.device, dtype: torch.dtype = DTYPES[0]) -> float:
    """Return the largest difference from the reference. Raise whatever the library raises.

    The library may compile kernels for minutes."""
    stream = gpu.new_stream(device)
    with torch.inference_mode(), gpu.use_stream(stream):
        found = [difference for shape in SHAPES for difference in differences(gpu, device, shape, dtype)]
        gpu.synchronize(device)
    return max(found)


def differences(gpu: Gpu, device: torch.device, shape: AttentionShape, dtype: torch.dtype) -> Iterator[float]:
    trial = AttentionTrial(gpu, device, shape, dtype)
    for rows in STEPS:
        yield trial.difference(rows, trial.inputs(rows))
    for width in WIDTHS:
        yield from trial.replayed(width)


class AttentionTrial:
    def __init__(self, gpu: Gpu, device: torch.device, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._gpu, self._device, self._shape, self._dtype = gpu, device, shape, dtype
        self._draw = torch.Generator().manual_seed(1)
        cos, sin = rope_tables(inverse_frequencies(shape.head_dim, THETA), MOST_TOKENS)
        self._tables = cos.to(device), sin.to(device)
        own = TorchAttention(shape, self._tables)
        self._theirs = FlashInferAttention(shape, dtype, own, gpu, device)
        self._per_row = MOST_TOKENS // PAGE_SIZE
        num_pages = 1 + GRAPH_ROWS * self._per_row
        self._order = 1 + torch.randperm(num_pages - 1, generator=self._draw).to(torch.int32)
        self._kv = self._drawn(num_pages, LAYERS, 2, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)

    def _drawn(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self._draw).to(self._device, self._dtype)

    def _qkv(self, num_tokens: int) -> torch.Tensor:
        return self._drawn(num_tokens, (self._shape.num_heads + 2 * self._shape.num_kv_heads) * self._shape.head_dim)

    def inputs(self, rows: TrialRows) -> AttentionInputs:
        positions = [
            before + torch.arange(num, dtype=torch.int64) for before, num in zip(rows.befores, rows.q_lens, strict=True)
        ]
        table = self._order.view(GRAPH_ROWS, self._per_row)[: len(rows.q_lens)]
        bounds = torch.from_numpy(rows.bounds)
        layout = Layout(
            bounds.to(self._device), (table.to(self._device),), max(rows.q_lens), MOST_TOKENS, host=rows.host
        )
        return AttentionInputs(torch.cat(positions).to(self._device), layout)

    def difference(self, rows: TrialRows, inputs: AttentionInputs) -> float:
        qkv = self._qkv(len(inputs.positions))
        self._theirs.begin(inputs, self._kv)
        return self._from_reference(self._theirs.attend(LAYER, qkv, None, None), inputs, qkv)

    def _from_reference(self, found: torch.Tensor, inputs: AttentionInputs, qkv: torch.Tensor) -> float:
        """Both write the same keys and values to the same pages."""
        reference = TorchAttention(self._shape, self._tables)
        reference.begin(inputs, self._kv)
        wanted = reference.attend(LAYER, qkv, None, None)
        difference = (found.float() - wanted.float()).abs().cpu()
        return float(difference.nan_to_num(nan=float("inf")).max())

    def replayed(self, width: int) -> Iterator[float]:
        """Capture a graph with padding rows alone, and replay it for other rows."""
        fixed = self._fixed(width)
        qkv = torch.zeros_like(self._qkv(GRAPH_ROWS * width))

        def attend() -> torch.Tensor:
            self._theirs.begin(fixed, self._kv)
            return self._theirs.attend(LAYER, qkv, None, None)

        self._theirs.plan_graph(fixed, None, PAGE_SIZE)
        attend()
        self._gpu.synchronize(self._device)
        with self._gpu.capture(self._gpu.new_graph_memory()) as graph:
            kept = attend()
        for befores in REPLAYED:
            num = len(befores)
            rows = TrialRows(befores, (width,) * num, num)
            step = self.inputs(rows)
            fixed.positions.zero_()
            fixed.layout.page_table.zero_()
            fixed.positions[: num * width] = step.positions
            fixed.layout.page_table[:num] = step.layout.page_table
            qkv[: num * width] = self._qkv(num * width)
            self._theirs.plan_graph(fixed, rows.host, PAGE_SIZE)
            graph.replay()
            yield self._from_reference(kept[: num * width], step, qkv[: num * width])
        graph.reset()

    def _fixed(self, width: int) -> AttentionInputs:
        bounds = equal_bounds(GRAPH_ROWS, width)
        table = torch.zeros((GRAPH_ROWS, self._per_row), dtype=torch.int32, device=self._device)
        host = HostLengths(bounds, None, GRAPH_ROWS)
        layout = Layout(torch.from_numpy(bounds).to(self._device), (table,), width, MOST_TOKENS, host=host)
        positions = torch.zeros(GRAPH_ROWS * width, dtype=torch.int64, device=self._device)
        return AttentionInputs(positions, layout)
