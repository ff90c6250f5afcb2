"""Rank a vocabulary's ids. A rank is one integer, made of logit and id, so ids never tie.

        | float32, ordered as an int32 | 2^32 - 1 - id |      NaN ranks last; -0 is 0

`SPLITS` programs share a row's ids in whole blocks; the last programs may get none. Maxima and sums of integers do not
depend on the order, so the number of splits changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)  # ids that a program reads at a time
LAST_ID = tl.constexpr(0xFFFFFFFF)
NO_RANK = tl.constexpr(-(1 << 63))
SIGN = tl.constexpr(-(1 << 31))


@triton.jit
def ordered(values):
    """Map float32 numbers to int64 in [0, 2^32), and keep their order; only NaN becomes 0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values == values, order.to(tl.int64) - SIGN, 0)


@triton.jit
def value_of(key):
    """Invert `ordered`."""
    order = (key + SIGN).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranked(values, ids):
    """Return int64 ranks; the id with the greatest rank comes first."""
    return ((ordered(values) + SIGN) << 32) | (ids.to(tl.int64) ^ LAST_ID)


@triton.jit
def id_of(rank):
    return (rank & LAST_ID) ^ LAST_ID


@triton.jit
def key_of(rank):
    """Return a rank's logit, as mapped by `ordered`."""
    return (rank >> 32) - SIGN


@triton.jit
def ids_of_split(split, vocab_size, SPLITS: tl.constexpr):
    """Return (begin, end)."""
    length = tl.cdiv(tl.cdiv(vocab_size, SPLITS), BLOCK) * BLOCK
    return split * length, tl.minimum((split + 1) * length, vocab_size)


def splits_of(num_rows: int) -> int:
    """Return how many programs share a row, enough to fill a GPU. Kernels are compiled for each of the three
    results."""
    return 64 if num_rows <= 4 else 16 if num_rows <= 32 else 4
