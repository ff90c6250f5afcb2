"""Order of a vocabulary's ids for Triton's kernels: by logit, equal ones by id, as one integer that has no ties.

        | float32, ordered as an int32 | 2^32 - 1 - id |      NaN ranks behind everything, -0 is 0

And how a row's ids are shared among programs: `SPLITS` runs of whole blocks, the last of which may be empty. A maximum
of such integers and a sum of integers have no order, so the number of splits never shows in a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)  # ids that a program looks at together
LAST_ID = tl.constexpr(0xFFFFFFFF)
NO_RANK = tl.constexpr(-(1 << 63))
SIGN = tl.constexpr(-(1 << 31))


@triton.jit
def ordered(values):
    """float32 -> int64 in [0, 2^32) of the same order; NaN is 0, which no other value is."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values == values, order.to(tl.int64) - SIGN, 0)


@triton.jit
def value_of(key):
    """What `ordered` made a key of."""
    order = (key + SIGN).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranked(values, ids):
    """int64, greater for what ranks before."""
    return ((ordered(values) + SIGN) << 32) | (ids.to(tl.int64) ^ LAST_ID)


@triton.jit
def id_of(rank):
    return (rank & LAST_ID) ^ LAST_ID


@triton.jit
def key_of(rank):
    """`ordered` of the value in a rank."""
    return (rank >> 32) - SIGN


@triton.jit
def ids_of_split(split, vocab_size, SPLITS: tl.constexpr):
    """(begin, end) of a split's ids."""
    length = tl.cdiv(tl.cdiv(vocab_size, SPLITS), BLOCK) * BLOCK
    return split * length, tl.minimum((split + 1) * length, vocab_size)


def splits_of(num_rows: int) -> int:
    """Programs for each of `num_rows` rows: enough to fill a GPU, from few choices, for each is compiled by itself."""
    return 64 if num_rows <= 4 else 16 if num_rows <= 32 else 4
