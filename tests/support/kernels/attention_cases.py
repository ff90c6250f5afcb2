"""Steps that reach every branch of paged attention: decode, verify, trees, chunks, windows, bytes, padding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from shared.kernel.attention.attention import AttentionShape
from shared.kernel.code.step_layout import HostLengths
from tests.support.kernels.paged_steps import Row, Step, make_step


def shape_of(heads: int, kv_heads: int, head_dim: int, window: int = 0, scale: float = 0.0) -> AttentionShape:
    return AttentionShape(heads, kv_heads, head_dim, 1e-5, windows=(0, window, 0) if window else (), scale=scale)


@dataclass(frozen=True)
class Case:
    shape: AttentionShape
    rows: tuple[Row, ...]
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    pages: str = ""
    norms: bool = False
    running: int | None = None  # rows that decode, as the host says
    tolerance: float = 2e-6
    seed: int = 6  # its trees of nine branch

    def step(self) -> Step:
        step = make_step(self.shape, list(self.rows), self.page_size, self.dtype, self.pages, self.norms, self.seed)
        if self.running is not None:
            host = HostLengths(np.asarray(step.inputs.layout.cu_q_lens), None, self.running)
            step.inputs = replace(step.inputs, layout=replace(step.inputs.layout, host=host))
        return step


TREE = Row(77, 9, is_tree=True)
PADDING = Row(0, 1, is_padding=True)
CASES = {
    "decode": Case(shape_of(6, 2, 64), (Row(0, 1), Row(15, 1), Row(63, 1), Row(64, 1), Row(200, 1))),
    "decode, odd heads": Case(shape_of(8, 1, 80), (Row(130, 1), Row(3, 1)), page_size=4),
    "decode, norms": Case(shape_of(3, 3, 96, scale=0.2), (Row(130, 1), Row(3, 1)), page_size=64, norms=True),
    "decode, window": Case(shape_of(4, 2, 128, window=50), (Row(300, 1), Row(20, 1), Row(49, 1), Row(50, 1))),
    "verify": Case(shape_of(7, 1, 64), (Row(129, 4), Row(62, 4), Row(0, 4)), page_size=1),
    "verify, tiny window": Case(shape_of(4, 2, 32, window=1), (Row(129, 4), Row(0, 4)), page_size=8),
    "trees": Case(shape_of(6, 2, 64), (TREE, replace(TREE, start=0), replace(TREE, start=63), Row(7, 9))),
    "trees, window": Case(shape_of(6, 2, 32, window=4), (TREE, replace(TREE, start=1), Row(70, 9))),
    "trees, window before them": Case(shape_of(4, 4, 32, window=30), (TREE, replace(TREE, start=200)), norms=True),
    "a wide tree": Case(shape_of(1, 1, 16), (Row(70, 48, is_tree=True),)),
    "int8": Case(shape_of(8, 2, 64), (Row(129, 2), Row(62, 2)), pages="int8"),
    "int8, wide heads": Case(shape_of(8, 2, 128), (Row(129, 2), Row(62, 2)), pages="int8"),
    "int8, very wide heads": Case(shape_of(2, 1, 256), (TREE, replace(TREE, start=5)), pages="int8", norms=True),
    "fp8, tree": Case(shape_of(8, 2, 128), (TREE, replace(TREE, start=5)), pages="fp8", page_size=4),
    "int8, window": Case(shape_of(4, 1, 80, window=70), (Row(200, 3), Row(5, 3)), pages="int8"),
    "float16": Case(shape_of(4, 2, 64), (Row(129, 2), Row(62, 2)), dtype=torch.float16, tolerance=2e-3),
    "float16, fp8": Case(shape_of(4, 2, 64), (Row(129, 2),), dtype=torch.float16, pages="fp8", tolerance=2e-3),
    "padding": Case(shape_of(6, 2, 64), (Row(130, 1), Row(9, 1), PADDING, PADDING)),
    "chunk": Case(shape_of(6, 2, 64), (Row(0, 49), Row(37, 18))),
    "chunk, odd heads": Case(shape_of(7, 1, 80), (Row(3, 29), Row(0, 7)), page_size=4, norms=True),
    "chunk, window": Case(shape_of(4, 2, 32, window=20), (Row(70, 60), Row(0, 33)), page_size=64),
    "chunk, bytes": Case(shape_of(4, 2, 96, window=20), (Row(33, 40),), pages="int8"),
    "chunk, fp8": Case(shape_of(8, 1, 128), (Row(33, 19),), pages="fp8"),
    "chunk, float16": Case(shape_of(4, 2, 64), (Row(33, 40),), dtype=torch.float16, tolerance=2e-3),
    "chunks and decode": Case(shape_of(6, 2, 64), (Row(9, 20), Row(0, 3), Row(70, 2), Row(9, 2)), running=2),
    "chunks and trees": Case(shape_of(6, 2, 64), (Row(9, 20), Row(0, 3), TREE, TREE), running=2),
    "chunks and trees, unsaid": Case(shape_of(6, 2, 64), (Row(9, 20), TREE)),
    "chunks and decode, window": Case(shape_of(4, 2, 64, window=30), (Row(29, 20), Row(130, 1)), running=1, norms=True),
    "a chunk and padding": Case(shape_of(6, 2, 64), (Row(9, 20), Row(70, 1), PADDING), running=2),
}
