"""Rows of one layer over a pool of pages, for tests of attention's backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.kernel.attention.attention import AttentionBackend, AttentionInputs, AttentionShape
from shared.kernel.attention.attention_numba import NumbaAttention
from shared.kernel.attention.rope import inverse_frequencies, rope_tables
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kernel.team.team import Team

MAX_LEN = 200
CPU = torch.device("cpu")
POISON = 0x5B  # a byte that was not written
SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=32, eps=1e-5)
SHAPES = {
    "gqa": SHAPE,
    "mha": AttentionShape(3, 3, 16, 1e-5),
    "one kv head, odd group": AttentionShape(7, 1, 64, 1e-5),
    "large group and head": AttentionShape(16, 2, 128, 1e-5),
    "8 lanes": AttentionShape(4, 2, 24, 1e-5),
    "4 lanes": AttentionShape(4, 2, 20, 1e-5),
    "sliding window": AttentionShape(6, 2, 32, 1e-5, windows=(0, 21, 0), scale=0.2),
}


def tables(shape: AttentionShape, device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_tables(inverse_frequencies(shape.head_dim, 10000.0), MAX_LEN)
    return cos.to(device), sin.to(device)


def numba_backend(
    shape: AttentionShape, dtype: torch.dtype = torch.float32, threads: int = 1, pages: torch.dtype | None = None
) -> NumbaAttention:
    return NumbaAttention(shape, dtype, tables(shape), Team(threads), page_dtype=pages)


@dataclass
class Paged:
    """Rows of random q, k, v of one layer in the middle of a pool, fed to a backend in steps. What was not written is
    NaN; of bytes (`pages`) the scales are."""

    backend: AttentionBackend
    shape: AttentionShape
    page_size: int = 16
    num_rows: int = 2
    dtype: torch.dtype = torch.float32
    layer: int = 1
    host: HostLengths | None = None
    device: torch.device = CPU
    pages: torch.dtype | None = None

    def __post_init__(self) -> None:
        per_row = -(-MAX_LEN // self.page_size)
        plane = (3, 2, self.shape.num_kv_heads, self.page_size, self.shape.head_dim)
        self.kv = torch.full((1 + self.num_rows * per_row, *plane), float("nan"), dtype=self.dtype)
        self.scales = None
        if self.pages is not None:
            self.scales = torch.full(self.kv.shape[:-1], float("nan"))
            self.kv = torch.full(self.kv.shape, POISON, dtype=torch.uint8).view(self.pages)
        order = torch.randperm(self.num_rows * per_row, generator=torch.Generator().manual_seed(3)) + 1
        self.table = order.to(torch.int32).view(self.num_rows, per_row)
        heads = self.shape.num_heads + 2 * self.shape.num_kv_heads
        generator = torch.Generator().manual_seed(4)
        data = torch.randn(self.num_rows, MAX_LEN, heads * self.shape.head_dim, generator=generator)
        self.qkv = data.to(self.dtype)
        self.kv, self.table, self.qkv = (of.to(self.device) for of in (self.kv, self.table, self.qkv))

    def step(self, spans: dict[int, tuple[int, int]], norms: bool = False) -> torch.Tensor:
        """Tokens [from, to) of each row."""
        q_lens = torch.tensor([stop - start for start, stop in spans.values()])
        inputs = AttentionInputs(
            positions=torch.cat([torch.arange(*span) for span in spans.values()]).to(self.device),
            layout=Layout(
                cu_q_lens=torch.cat((torch.zeros(1, dtype=torch.long), q_lens.cumsum(0))).to(self.device, torch.int32),
                page_tables=(self.table[list(spans)],),
                max_q_len=int(q_lens.max()),
                max_seq_len=max(stop for _, stop in spans.values()),
                host=self.host,
            ),
        )
        self.backend.begin(inputs, self.kv, self.scales)
        qkv = torch.cat([self.qkv[row, start:stop] for row, (start, stop) in spans.items()])
        weights = (torch.linspace(0.5, 1.5, self.shape.head_dim),) * 2 if norms else (None, None)
        return self.backend.attend(self.layer, qkv, *weights).clone()
