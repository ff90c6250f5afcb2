"""Read the blocks of a GGUF file's matrices as numbers, scales and lows (ggml: mins), without rounding.

The layouts are ggml's block_q4_0, block_q4_1, block_q8_0, block_q4_K and block_q6_K.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.block_weights import SIGN_BIT, BlockFormat, BlockWeights

Raw = npt.NDArray[np.uint8]
Parts = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32] | None]

Q4_0 = BlockFormat("Q4_0", bits=4, zero=8)
Q4_1 = BlockFormat("Q4_1", bits=4, zero=0, has_low=True)
Q8_0 = BlockFormat("Q8_0", bits=8, zero=SIGN_BIT)
Q4_K = BlockFormat("Q4_K", bits=4, zero=0, has_low=True, half_scales=False)
Q6_K = BlockFormat("Q6_K", bits=8, zero=32, half_scales=False, block=16)


def blocks_of(rows: Raw, kind: str) -> BlockWeights | None:
    """Return the matrix of `rows` (N, bytes), or None for a kind without blocks."""
    found = LAYOUTS.get(kind)
    if found is None:
        return None
    form, num_bytes, read = found
    numbers, scales, lows = read(np.asarray(rows).reshape(len(rows), -1, num_bytes))

    def matrix(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(len(rows), -1)))

    return BlockWeights(form, matrix(numbers), matrix(scales), None if lows is None else matrix(lows))


def _halves(blocks: Raw, begin: int) -> npt.NDArray[np.float32]:
    """Return the float16 at byte `begin` of each block, as (N, B, 1) float32."""
    return np.ascontiguousarray(blocks[..., begin : begin + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Raw) -> Raw:
    """Split (..., n) bytes into (..., 2 n) half bytes: all lower halves, then all upper halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Raw) -> Parts:
    return _nibbles(blocks[..., 2:]), _halves(blocks, 0), None


def _q4_1(blocks: Raw) -> Parts:
    return _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Raw) -> Parts:
    # the xor adds 128 to a signed number
    return blocks[..., 2:] ^ np.uint8(SIGN_BIT), _halves(blocks, 0), None


def _q4_k(blocks: Raw) -> Parts:
    """Read each block of 256 as eight blocks of 32. The eight 6-bit scales share one factor, and the eight
    6-bit lows share another."""
    packed = blocks[..., 4:16]
    first, second, upper = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (upper & 15) | (first >> 6 << 4)], axis=-1)
    lows = np.concatenate([second & 63, (upper >> 4) | (second >> 6 << 4)], axis=-1)
    numbers = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return numbers, _halves(blocks, 0) * scales, -_halves(blocks, 2) * lows


def _q6_k(blocks: Raw) -> Parts:
    """Read each block of 256 as sixteen blocks of 16. First come the lower four bits of all numbers, then the upper
    two bits. Each part has two halves of 128 numbers.
    """
    lower = blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)
    upper = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    pairs = (upper >> shifts << 4 & 48).astype(np.uint8).reshape(*blocks.shape[:2], 2, 128)
    numbers = _nibbles(lower) | pairs
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return numbers, (_halves(blocks, 208) * scales).astype(np.float32), None


LAYOUTS: dict[str, tuple[BlockFormat, int, Callable[[Raw], Parts]]] = {
    "Q4_0": (Q4_0, 18, _q4_0),
    "Q4_1": (Q4_1, 20, _q4_1),
    "Q8_0": (Q8_0, 34, _q8_0),
    "Q4_K": (Q4_K, 144, _q4_k),
    "Q6_K": (Q6_K, 210, _q6_k),
}
