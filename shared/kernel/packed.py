"""A product's weight as its kernel reads it: made once, kept in memory or in a file that several processes map."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.kernel.block_weights import BlockFormat
from shared.kernel.shares import TILE_COLUMNS


@dataclass(frozen=True, slots=True)
class Packed:
    """What a kernel needs besides x. The tensors are never written to."""

    shape: tuple[int, int]  # (out, in), without the columns that fill up a tile
    dtype: torch.dtype  # of x: bfloat16 or float32
    weight: torch.Tensor  # in the kernel's own layout
    bias: torch.Tensor  # (columns of all tiles,) float32
    scale: torch.Tensor | None = None  # the same, where a number is a byte
    form: BlockFormat | None = None  # of blocks


def processor() -> str:
    """Return what decides which layout a kernel reads here: the processor and all that it can do."""
    import llvmlite.binding as llvm

    from shared.kernel.jit import processor_features  # numba, which is not there everywhere

    has = sorted(name for name, there in processor_features().items() if there)
    return f"{llvm.get_host_cpu_name()} {','.join(has)}"


def of_columns(values: torch.Tensor | None, num_tiles: int) -> torch.Tensor:
    """Return one float32 number per column of all tiles; 0 where there is none."""
    filled = torch.zeros(num_tiles * TILE_COLUMNS)
    if values is not None:
        filled[: len(values)] = values
    return filled
