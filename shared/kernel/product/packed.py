"""A product's weight in its kernel's layout, packed once, in memory or in a file that several processes map."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.kernel.product.block_weights import BlockFormat
from shared.kernel.team.shares import TILE_COLUMNS


@dataclass(frozen=True, slots=True)
class Packed:
    """A kernel's read-only inputs, except x."""

    shape: tuple[int, int]  # (out, in), without tile padding
    dtype: torch.dtype  # x's dtype: bfloat16 or float32
    weight: torch.Tensor  # in the kernel's layout
    bias: torch.Tensor  # (columns of all tiles,) float32
    scale: torch.Tensor | None = None  # a byte weight's scales, in the bias's shape
    form: BlockFormat | None = None  # of block weights


def processor() -> str:
    """Return the processor's name and features, which decide a layout."""
    import llvmlite.binding as llvm

    from shared.kernel.code.jit import processor_features  # imports numba

    has = sorted(name for name, there in processor_features().items() if there)
    return f"{llvm.get_host_cpu_name()} {','.join(has)}"


def of_columns(values: torch.Tensor | None, num_tiles: int) -> torch.Tensor:
    """Return `values`, padded with zeros to the columns of all tiles, in float32."""
    filled = torch.zeros(num_tiles * TILE_COLUMNS)
    if values is not None:
        filled[: len(values)] = values
    return filled


def of_tiles(values: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """Pad (N, n) values with zeros to the columns of all tiles."""
    filled = torch.zeros(num_tiles * TILE_COLUMNS, values.shape[1], dtype=values.dtype)
    filled[: len(values)] = values
    return filled


def by_block(values: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """Return (N, blocks of k) values as (tiles, blocks of k, bytes) uint8."""
    padded = of_tiles(values, num_tiles).view(num_tiles, TILE_COLUMNS, -1)
    return padded.transpose(1, 2).contiguous().view(torch.uint8)
