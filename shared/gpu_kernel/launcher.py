"""The one place from which Triton kernels are launched."""

from __future__ import annotations

from typing import Any


def launch(
    kernel: Any, grid: tuple[int, ...], *args: object, num_warps: int = 4, num_stages: int = 2, **constants: object
) -> None:
    """Enqueue `kernel` on the current stream of the tensors' device. `grid`: up to three numbers of programs; nothing
    is launched where one is 0. `constants`: its tl.constexpr parameters, by name.

    A product and a sum are never contracted to one rounding: what must have the CPU's bits has them."""
    if 0 in grid:
        return
    kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False, **constants)
