"""Read the blocks of a GGUF file's matrices as numbers, scales and lows (ggml: mins), without rounding.

The layouts are ggml's block_q4_0, block_q4_1, block_q5_0, block_q5_1, block_q8_0, block_q2_K, block_q3_K, block_q4_K,
block_q5_K, block_q6_K, block_iq4_nl and block_iq4_xs. Formats of 2, 3, 5 and 6 bits get one byte per number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.product.block_weights import SIGN_BIT, BlockFormat, BlockWeights

Raw = npt.NDArray[np.uint8]
Parts = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32] | None]

Q4_0 = BlockFormat("Q4_0", bits=4, zero=8)
Q4_1 = BlockFormat("Q4_1", bits=4, zero=0, has_low=True)
Q8_0 = BlockFormat("Q8_0", bits=8, zero=SIGN_BIT)
Q4_K = BlockFormat("Q4_K", bits=4, zero=0, has_low=True, half_scales=False)
Q6_K = BlockFormat("Q6_K", bits=8, zero=32, half_scales=False, block=16)
Q5_0 = BlockFormat("Q5_0", bits=8, zero=16)
Q5_1 = BlockFormat("Q5_1", bits=8, zero=0, has_low=True)
Q5_K = BlockFormat("Q5_K", bits=8, zero=0, has_low=True, half_scales=False)
Q2_K = BlockFormat("Q2_K", bits=8, zero=0, has_low=True, half_scales=False, block=16)
Q3_K = BlockFormat("Q3_K", bits=8, zero=4, half_scales=False, block=16)
IQ4_NL = BlockFormat("IQ4_NL", bits=8, zero=SIGN_BIT)
IQ4_XS = BlockFormat("IQ4_XS", bits=8, zero=SIGN_BIT, half_scales=False)
# What each half byte of the IQ4 formats stands for.
IQ4_NUMBERS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]) + SIGN_BIT


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


def _upper_bits(packed: Raw) -> Raw:
    """Return one bit per number (..., 32), from 4 bytes, the lowest bit first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def _joined(lower: Raw, upper: Raw, num_lower: int) -> Raw:
    """Return the numbers whose first `num_lower` bits are apart from the others."""
    numbers: Raw = (lower | upper << num_lower).astype(np.uint8)
    return numbers


def _q5_0(blocks: Raw) -> Parts:
    return _joined(_nibbles(blocks[..., 6:]), _upper_bits(blocks[..., 2:6]), 4), _halves(blocks, 0), None


def _q5_1(blocks: Raw) -> Parts:
    return _joined(_nibbles(blocks[..., 8:]), _upper_bits(blocks[..., 4:8]), 4), _halves(blocks, 0), _halves(blocks, 2)


def _k_scales(packed: Raw) -> tuple[Raw, Raw]:
    """Return eight 6-bit scales and eight 6-bit lows of a block of 256."""
    first, second, upper = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (upper & 15) | (first >> 6 << 4)], axis=-1)
    return scales, np.concatenate([second & 63, (upper >> 4) | (second >> 6 << 4)], axis=-1)


def _planes(packed: Raw, bits: int) -> Raw:
    """Return the numbers of `bits` bits that (..., n) bytes hold: the lowest bits of all bytes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes: Raw = (packed[..., None, :] >> shifts & ((1 << bits) - 1)).astype(np.uint8)
    return planes


def _q4_k(blocks: Raw) -> Parts:
    """Read each block of 256 as eight blocks of 32. The eight 6-bit scales share one factor, and the eight
    6-bit lows share another."""
    scales, lows = _k_scales(blocks[..., 4:16])
    numbers = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return numbers, _halves(blocks, 0) * scales, -_halves(blocks, 2) * lows


def _q5_k(blocks: Raw) -> Parts:
    """Read as Q4_K, with a fifth bit: bit b of 32 bytes belongs to the b-th block of 32."""
    scales, lows = _k_scales(blocks[..., 4:16])
    lower = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    numbers = _joined(lower, _planes(blocks[..., 16:48], 1), 4)
    return numbers, _halves(blocks, 0) * scales, -_halves(blocks, 2) * lows


def _q2_k(blocks: Raw) -> Parts:
    """Read each block of 256 as sixteen blocks of 16, with scales and lows of four bits."""
    scales, lows = blocks[..., :16] & 15, blocks[..., :16] >> 4
    numbers = _planes(blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 32), 2)
    return numbers, _halves(blocks, 80) * scales, -_halves(blocks, 82) * lows


def _q3_k(blocks: Raw) -> Parts:
    """Read each block of 256 as sixteen blocks of 16, with signed scales of six bits: first the lower four bits of all
    scales, then the upper two."""
    upper, lower = _planes(blocks[..., :32], 1), _planes(blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 32), 2)
    numbers = _joined(lower.reshape(*blocks.shape[:2], 8, 32), upper, 2)
    scales = _nibbles(blocks[..., 96:104]) | _planes(blocks[..., 104:108], 2).reshape(*blocks.shape[:2], 16) << 4
    return numbers, (_halves(blocks, 108) * (scales.astype(np.int8) - 32)).astype(np.float32), None


def _iq4_nl(blocks: Raw) -> Parts:
    return IQ4_NUMBERS.astype(np.uint8)[_nibbles(blocks[..., 2:])], _halves(blocks, 0), None


def _iq4_xs(blocks: Raw) -> Parts:
    """Read each block of 256 as eight blocks of 32, with signed scales of six bits."""
    lower = _planes(blocks[..., 4:8, None], 4).reshape(*blocks.shape[:2], 8)
    upper = _planes(blocks[..., 2:4, None], 2).reshape(*blocks.shape[:2], 8)
    scales = (lower | upper << 4).astype(np.int8) - 32
    numbers = _nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))
    return IQ4_NUMBERS.astype(np.uint8)[numbers], (_halves(blocks, 0) * scales).astype(np.float32), None


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
    "Q5_0": (Q5_0, 22, _q5_0),
    "Q5_1": (Q5_1, 24, _q5_1),
    "Q2_K": (Q2_K, 84, _q2_k),
    "Q3_K": (Q3_K, 110, _q3_k),
    "Q5_K": (Q5_K, 176, _q5_k),
    "IQ4_NL": (IQ4_NL, 18, _iq4_nl),
    "IQ4_XS": (IQ4_XS, 136, _iq4_xs),
}
