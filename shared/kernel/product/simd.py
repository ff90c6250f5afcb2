"""Attention's inner loops as vector code, written for LLVM by hand. numba inlines them into attend_numba.py.

The compiler alone would keep sums in memory and add each product's lanes separately: twice the work. A block is `lanes`
keys or values, each with its own address.

    lanes: 16 where head_dim (D) is a multiple of 16, else 8 or 4; D / lanes vectors hold one head
    dot(q, k): lane l sums q[l + lanes * j] k[l + lanes * j] over j, then halves are added until one lane is left

A block that many queries share is transposed.

Items.PAIRS: all factors are bfloat16, and two products are added at a time, the second one first, as AVX-512 does.
Scores pair neighbouring numbers of a head; weighted sums pair neighbouring values.

group, head_dim and items are constants. Everything else is an address or a stride. `keys`, `values` and `scales` point
to (lanes,) int64 addresses. Row g of scores (or weights) is `lanes` float32 numbers at out (or weights) + g * stride;
`stride` is in bytes.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils

from shared.kernel.code.items import Items, narrowed
from shared.kernel.code.jit import emitted_for_constants
from shared.kernel.product.byte_rows import emit_hadamard
from shared.kernel.product.product import STEPS, SUMS, lower_halves, round_to_half, write_at
from shared.kernel.product.vectors import FLOAT, LONG, Vectors, are_paired

# how many of the 32 vector registers may hold queries (score_block), and sums (sum_block)
QUERY_REGISTERS, SUM_REGISTERS = 16, 20
SMALLEST_SCALE = 2.0**-126  # smallest divisor of a row: the smallest normal float32
TREE_QUERIES = 4  # queries scored at a time, each with up to 5 vectors of partial sums


@emitted_for_constants
def score_block(
    typing_context: Any,
    group: Any,
    head_dim: Any,
    items: Any,
    queries: Any,
    keys: Any,
    scales: Any,
    out: Any,
    stride: Any,
    tops: Any,
) -> Any:
    """Emit the products of queries (group, D) float32 with one block of keys.

    Each number of `tops` (group, lanes) float32 becomes the maximum of itself and the score of its query and lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Vectors(builder, head_dim.literal_value, Items(items.literal_value))
        _, _, _, queries_at, keys_at, scales_at, out_at, stride_bytes, tops_at = args
        chunk = max(1, QUERY_REGISTERS // code.per_sum)
        for first in range(0, group.literal_value, chunk):
            heads = range(first, min(first + chunk, group.literal_value))
            vectors = {g: code.read_floats(queries_at, g * code.words, code.per_head) for g in heads}
            trees: dict[int, list[tuple[int, Any]]] = {g: [] for g in heads}
            for lane in range(code.lanes):
                key = code.read_block(keys_at, scales_at, lane)
                for g in heads:
                    code.push(trees[g], code.dot(vectors[g], key))
            for g in heads:
                scores = trees[g][0][1]
                code.write(code.offset(out_at, builder.mul(stride_bytes, LONG(g))), 0, scores)
                code.raise_top(tops_at, g, scores)
        return context.get_dummy_value()

    return _block_signature((group, head_dim, items), queries, keys, scales, out, stride, tops), codegen


@emitted_for_constants
def sum_block(
    typing_context: Any,
    group: Any,
    head_dim: Any,
    items: Any,
    is_copy: Any,
    weights: Any,
    stride: Any,
    values: Any,
    scales: Any,
    sums: Any,
) -> Any:
    """Emit code that adds a block of weighted values to `sums` (group, D) float32, in order.

    is_copy, a constant: `values` is the address of what copy_block wrote."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Vectors(builder, head_dim.literal_value, Items(items.literal_value))
        _, _, _, _, weights_at, stride_bytes, values_at, scales_at, sums_at = args
        chunk = max(1, SUM_REGISTERS // code.per_sum)
        for first in range(0, group.literal_value, chunk):
            heads = range(first, min(first + chunk, group.literal_value))
            totals = {g: code.read_floats(sums_at, g * code.head_dim, code.per_sum) for g in heads}
            rows = {g: code.offset(weights_at, builder.mul(stride_bytes, LONG(g))) for g in heads}
            for place in code.value_order():
                if is_copy.literal_value:
                    value = code.read_floats(values_at, place * code.head_dim, code.per_sum)
                else:
                    value = code.read_value(values_at, scales_at, place)
                for g in heads:
                    weight = code.splat(rows[g], place)
                    totals[g] = [code.add_product(weight, v, t) for v, t in zip(value, totals[g], strict=True)]
            for g in heads:
                for j, total in enumerate(totals[g]):
                    code.write(sums_at, g * code.head_dim + j * code.lanes, total)
        return context.get_dummy_value()

    return _block_signature((group, head_dim, items, is_copy), weights, stride, values, scales, sums), codegen


@emitted_for_constants
def transpose_block(typing_context: Any, head_dim: Any, items: Any, keys: Any, scales: Any, out: Any) -> Any:
    """Emit code that writes keys, widened and transposed, to `out`: (D, lanes) float32, or (D / 2, lanes) pairs."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Vectors(builder, head_dim.literal_value, Items(items.literal_value))
        rows = [code.read_block(args[2], args[3], lane) for lane in range(code.lanes)]
        for j in range(code.per_head):
            for n, vector in enumerate(code.transposed([row[j] for row in rows])):
                code.write(args[4], (j * code.lanes + n) * code.lanes, vector)
        return context.get_dummy_value()

    return _block_signature((head_dim, items), keys, scales, out), codegen


@emitted_for_constants
def copy_block(typing_context: Any, head_dim: Any, items: Any, values: Any, scales: Any, out: Any) -> Any:
    """Emit code that writes widened values to `out`: (lanes, D) float32, or (lanes / 2, D) pairs."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Vectors(builder, head_dim.literal_value, Items(items.literal_value))
        for place in code.value_order():
            for j, vector in enumerate(code.read_value(args[2], args[3], place)):
                code.write(args[4], place * code.head_dim + j * code.lanes, vector)
        return context.get_dummy_value()

    return _block_signature((head_dim, items), values, scales, out), codegen


@emitted_for_constants
def score_transposed(
    typing_context: Any, group: Any, head_dim: Any, items: Any, queries: Any, keys: Any, out: Any, stride: Any,
    tops: Any,
) -> Any:  # fmt: skip
    """Emit score_block's products, with the same bits, for keys that transpose_block wrote to the address `keys`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Vectors(builder, head_dim.literal_value, Items(items.literal_value))
        _, _, _, queries_at, keys_at, out_at, stride_bytes, tops_at = args
        chunks = -(-group.literal_value // TREE_QUERIES)
        size = -(-group.literal_value // chunks)
        for first in range(0, group.literal_value, size):
            heads = range(first, min(first + size, group.literal_value))
            trees: dict[int, list[tuple[int, Any]]] = {g: [] for g in heads}
            for lane in code.halving_order():
                numbers = range(lane, code.words, code.lanes)
                key = [code.read(keys_at, d * code.lanes) for d in numbers]
                for g in heads:
                    query = [code.splat(queries_at, g * code.words + d) for d in numbers]
                    code.push_whole(trees[g], code.dot(query, key))
                for g in heads:
                    code.settle(trees[g])
            for g in heads:
                code.raise_top(tops_at, g, trees[g][0][1])
                code.write(code.offset(out_at, builder.mul(stride_bytes, LONG(g))), 0, trees[g][0][1])
        return context.get_dummy_value()

    return _block_signature((group, head_dim, items), queries, keys, out, stride, tops), codegen


@emitted_for_constants
def split_pairs(typing_context: Any, head_dim: Any, row: Any, out: Any) -> Any:
    """Emit code that writes one `split` head to `out`, (D,) float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Vectors(builder, head_dim.literal_value, Items.HALVES)
        for j, vector in enumerate(code.split(args[1])):
            code.write(args[2], j * code.lanes, vector)
        return context.get_dummy_value()

    return _block_signature((head_dim,), row, out), codegen


@emitted_for_constants
def narrow_weights(typing_context: Any, items: Any, row: Any, count: Any) -> Any:
    """Emit code that rounds `count` blocks of 16 float32 weights to bfloat16, in place, if `items` are PAIRS.

    Paired weights are also packed, two in a word."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = Items(items.literal_value)
        if kind == Items.PAIRS:
            with cgutils.for_range(builder, args[2]) as loop:
                source = builder.add(args[1], builder.mul(loop.index, LONG(64)))
                halves = round_to_half(builder, builder.load(builder.inttoptr(source, SUMS.as_pointer()), align=4))
                if are_paired(kind):
                    target = builder.add(args[1], builder.mul(loop.index, LONG(32)))
                    write_at(builder, target, halves)
                else:
                    wide = lower_halves(builder, builder.zext(halves, STEPS))
                    write_at(builder, source, wide)
        return context.get_dummy_value()

    return _block_signature((items,), row, count), codegen


@emitted_for_constants
def narrow_row(
    typing_context: Any, head_dim: Any, source_items: Any, items: Any, size: Any, row: Any, out: Any, scale: Any
) -> Any:
    """Emit code that rounds one head (source_items: floats or halves) to bytes with a scale.

    The head is mixed by Hadamard matrices of this size first. The bits equal quantized.py's, NaN and infinity included.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Vectors(builder, head_dim.literal_value, Items(source_items.literal_value))
        kind = Items(items.literal_value)
        _, _, _, _, row_at, out_at, scale_at = args
        numbers, by = code.read_items(row_at), size.literal_value
        if by > 1:
            numbers = [builder.fmul(number, code.all(1 / by)) for number in emit_hadamard(builder, numbers, by)]
        code.write_scale(scale_at, builder.fdiv(code.peak(numbers), FLOAT(kind.largest)))
        unit = code.splat(scale_at, 0)
        is_tiny = builder.fcmp_ordered("<", unit, code.all(SMALLEST_SCALE))
        unit = builder.select(is_tiny, code.all(SMALLEST_SCALE), unit)
        for j, vector in enumerate(numbers):
            code.write_bytes(out_at, j * code.lanes, narrowed(builder, builder.fdiv(vector, unit), kind))
        return context.get_dummy_value()

    return _block_signature((head_dim, source_items, items, size), row, out, scale), codegen


def _block_signature(constants: tuple[Any, ...], *addresses: Any) -> Any:
    if not all(isinstance(constant, types.Literal) for constant in constants):
        raise TypeError("group, head_dim and items must be constants where a block is used")
    return types.void(*constants, *(types.int64 for _ in addresses))
