"""Attention's inner loops as vector code, written for LLVM by hand. numba inlines them into attend_numba.py.

The compiler alone would keep sums in memory and add each product's lanes separately: twice the work. A block is `lanes`
keys or values, each with its own address, so page size does not matter.

    lanes: 16 where head_dim (D) is a multiple of 16, else 8 or 4; D / lanes vectors hold one head
    dot(q, k): lane l sums q[l + lanes * j] k[l + lanes * j] over j, then halves are added until one lane is left

A block that many queries share is transposed, so that each lane is one key.

group, head_dim and items are constants. Everything else is an address or a stride. `keys`, `values` and `scales` point
to (lanes,) int64 addresses; `scales` is used only if items have scales. Row g of scores (or weights) is
`lanes` float32 numbers at out (or weights) + g * stride; `stride` is in bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from shared.kernel.items import Items, magnitude_bits, narrowed, widened
from shared.kernel.jit import emit_call, emit_fence, emit_for_floats, emitted_for_constants

FLOAT, LONG = ir.FloatType(), ir.IntType(64)
# how many of the 32 vector registers may hold queries (score_block), and sums (weigh_block)
QUERY_REGISTERS, SUM_REGISTERS = 16, 20
SMALLEST_SCALE = 2.0**-126  # smallest divisor of a row: the smallest normal float32
TREE_QUERIES = 4  # queries scored at a time, each with up to 5 vectors of partial sums


def block_lanes(head_dim: int) -> int:
    """Return how many float32 lanes a head's vectors have, or 0 if no width divides head_dim."""
    return next((lanes for lanes in (16, 8, 4) if head_dim % lanes == 0), 0)


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
        code = _Vectors(builder, head_dim.literal_value, Items(items.literal_value))
        _, _, _, queries_at, keys_at, scales_at, out_at, stride_bytes, tops_at = args
        chunk = max(1, QUERY_REGISTERS // code.per_head)
        for first in range(0, group.literal_value, chunk):
            heads = range(first, min(first + chunk, group.literal_value))
            vectors = {g: code.read_floats(queries_at, g * code.head_dim) for g in heads}
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
def weigh_block(
    typing_context: Any,
    group: Any,
    head_dim: Any,
    items: Any,
    weights: Any,
    stride: Any,
    values: Any,
    scales: Any,
    sums: Any,
) -> Any:
    """Emit code that adds a block of weighted values to `sums` (group, D) float32, in order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Vectors(builder, head_dim.literal_value, Items(items.literal_value))
        _, _, _, weights_at, stride_bytes, values_at, scales_at, sums_at = args
        chunk = max(1, SUM_REGISTERS // code.per_head)
        for first in range(0, group.literal_value, chunk):
            heads = range(first, min(first + chunk, group.literal_value))
            totals = {g: code.read_floats(sums_at, g * code.head_dim) for g in heads}
            rows = {g: code.offset(weights_at, builder.mul(stride_bytes, LONG(g))) for g in heads}
            for lane in range(code.lanes):
                value = code.read_block(values_at, scales_at, lane)
                for g in heads:
                    weight = code.splat(rows[g], lane)
                    totals[g] = [code.add_product(weight, v, t) for v, t in zip(value, totals[g], strict=True)]
            for g in heads:
                for j, total in enumerate(totals[g]):
                    code.write(sums_at, g * code.head_dim + j * code.lanes, total)
        return context.get_dummy_value()

    return _block_signature((group, head_dim, items), weights, stride, values, scales, sums), codegen


@emitted_for_constants
def turn_block(typing_context: Any, head_dim: Any, items: Any, keys: Any, scales: Any, out: Any) -> Any:
    """Emit code that writes keys, widened and transposed, to `out`, (D, lanes) float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Vectors(builder, head_dim.literal_value, Items(items.literal_value))
        rows = [code.read_block(args[2], args[3], lane) for lane in range(code.lanes)]
        for j in range(code.per_head):
            for n, vector in enumerate(code.turned([row[j] for row in rows])):
                code.write(args[4], (j * code.lanes + n) * code.lanes, vector)
        return context.get_dummy_value()

    return _block_signature((head_dim, items), keys, scales, out), codegen


@emitted_for_constants
def widen_block(typing_context: Any, head_dim: Any, items: Any, values: Any, scales: Any, out: Any) -> Any:
    """Emit code that writes widened values to `out`, (lanes, D) float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Vectors(builder, head_dim.literal_value, Items(items.literal_value))
        for lane in range(code.lanes):
            for j, vector in enumerate(code.read_block(args[2], args[3], lane)):
                code.write(args[4], lane * code.head_dim + j * code.lanes, vector)
        return context.get_dummy_value()

    return _block_signature((head_dim, items), values, scales, out), codegen


@emitted_for_constants
def score_turned(
    typing_context: Any, group: Any, head_dim: Any, queries: Any, keys: Any, out: Any, stride: Any, tops: Any
) -> Any:
    """Emit score_block's products, with the same bits, for keys that turn_block wrote to the address `keys`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Vectors(builder, head_dim.literal_value, Items.FLOATS)
        _, _, queries_at, keys_at, out_at, stride_bytes, tops_at = args
        chunks = -(-group.literal_value // TREE_QUERIES)
        size = -(-group.literal_value // chunks)
        for first in range(0, group.literal_value, size):
            heads = range(first, min(first + size, group.literal_value))
            trees: dict[int, list[tuple[int, Any]]] = {g: [] for g in heads}
            for lane in code.halving_order():
                numbers = range(lane, code.head_dim, code.lanes)
                key = [code.read(keys_at, d * code.lanes) for d in numbers]
                for g in heads:
                    query = [code.splat(queries_at, g * code.head_dim + d) for d in numbers]
                    code.push_whole(trees[g], code.dot(query, key))
            for g in heads:
                code.raise_top(tops_at, g, trees[g][0][1])
                code.write(code.offset(out_at, builder.mul(stride_bytes, LONG(g))), 0, trees[g][0][1])
        return context.get_dummy_value()

    return _block_signature((group, head_dim), queries, keys, out, stride, tops), codegen


@emitted_for_constants
def narrow_row(
    typing_context: Any, head_dim: Any, source_items: Any, items: Any, row: Any, out: Any, scale: Any
) -> Any:
    """Emit code that rounds one head (source_items: floats or halves) to bytes with a scale.

    The bits equal quantized.py's, NaN and infinity included."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Vectors(builder, head_dim.literal_value, Items(source_items.literal_value))
        kind = Items(items.literal_value)
        _, _, _, row_at, out_at, scale_at = args
        numbers = code.read_items(row_at)
        code.write_scale(scale_at, builder.fdiv(code.peak(numbers), FLOAT(kind.largest)))
        unit = code.splat(scale_at, 0)
        is_tiny = builder.fcmp_ordered("<", unit, code.all(SMALLEST_SCALE))
        unit = builder.select(is_tiny, code.all(SMALLEST_SCALE), unit)
        for j, vector in enumerate(numbers):
            code.write_bytes(out_at, j * code.lanes, narrowed(builder, builder.fdiv(vector, unit), kind))
        return context.get_dummy_value()

    return _block_signature((head_dim, source_items, items), row, out, scale), codegen


def _block_signature(constants: tuple[Any, ...], *addresses: Any) -> Any:
    if not all(isinstance(constant, types.Literal) for constant in constants):
        raise TypeError("group, head_dim and items must be constants where a block is used")
    return types.void(*constants, *(types.int64 for _ in addresses))


class _Vectors:
    """Indices count float32 numbers or the pool's items. Addresses are int64."""

    def __init__(self, builder: Any, head_dim: int, items: Items) -> None:
        self._builder, self._items = builder, items
        self.head_dim = head_dim
        self.lanes = block_lanes(head_dim)
        self.per_head = head_dim // self.lanes
        self._type = ir.VectorType(FLOAT, self.lanes)

    def offset(self, address: Any, num_bytes: Any) -> Any:
        return self._builder.add(address, num_bytes)

    def _at(self, address: Any, num_bytes: int, kind: Any) -> Any:
        return self._builder.inttoptr(self._builder.add(address, LONG(num_bytes)), kind.as_pointer())

    def read(self, address: Any, index: int) -> Any:
        return self._builder.load(self._at(address, 4 * index, self._type), align=4)

    def write(self, address: Any, index: int, vector: Any) -> None:
        self._builder.store(vector, self._at(address, 4 * index, self._type), align=4)

    def read_long(self, address: Any, index: int) -> Any:
        return self._builder.load(self._at(address, 8 * index, LONG), align=8)

    def read_floats(self, address: Any, first: int) -> list[Any]:
        return [self.read(address, first + j * self.lanes) for j in range(self.per_head)]

    def read_block(self, addresses: Any, scales: Any, lane: int) -> list[Any]:
        scale = self.read_long(scales, lane) if self._items.has_scales else None
        return self.read_items(self.read_long(addresses, lane), scale)

    def read_items(self, address: Any, scale: Any = None) -> list[Any]:
        """Read one head as float32. Bytes are widened, then multiplied by the scale at the address `scale`."""
        if self._items == Items.FLOATS:
            return self.read_floats(address, 0)
        size, build = self._items.num_bytes, self._builder
        narrow, words = (ir.VectorType(ir.IntType(bits), self.lanes) for bits in (8 * size, 32))
        places = [self._at(address, size * j * self.lanes, narrow) for j in range(self.per_head)]
        vectors = [build.load(place, align=size) for place in places]
        if self._items.has_scales:
            unit = self.splat(scale, 0)
            wide = [widened(build, vector, self._items) for vector in vectors]
            return [emit_fence(build, build.fmul(emit_fence(build, numbers), unit)) for numbers in wide]
        upper = ir.Constant(words, [16] * self.lanes)
        return [build.bitcast(build.shl(build.zext(vector, words), upper), self._type) for vector in vectors]

    def peak(self, vectors: list[Any]) -> Any:
        """Return the largest magnitude; NaN if any number is NaN."""
        build = self._builder
        top, *others = [magnitude_bits(build, vector) for vector in vectors]
        for other in others:
            top = build.select(build.icmp_unsigned(">", other, top), other, top)
        bits = emit_call(build, f"llvm.vector.reduce.umax.v{self.lanes}i32", ir.IntType(32), [top])
        return build.bitcast(bits, FLOAT)

    def write_scale(self, address: Any, scale: Any) -> None:
        self._builder.store(scale, self._at(address, 0, FLOAT), align=4)

    def write_bytes(self, address: Any, index: int, data: Any) -> None:
        self._builder.store(data, self._at(address, index, data.type), align=1)

    def all(self, value: float) -> Any:
        return ir.Constant(self._type, [value] * self.lanes)

    def splat(self, address: Any, index: int) -> Any:
        scalar = self._builder.load(self._at(address, 4 * index, FLOAT), align=4)
        first = self._builder.insert_element(ir.Constant(self._type, ir.Undefined), scalar, ir.IntType(32)(0))
        return self._shuffle(first, first, [0] * self.lanes)

    def dot(self, left: list[Any], right: list[Any]) -> Any:
        total = self._builder.fmul(left[0], right[0])
        for x, y in zip(left[1:], right[1:], strict=True):
            total = self.add_product(x, y, total)
        return total

    def add_product(self, x: Any, y: Any, z: Any) -> Any:
        """Return x * y + z, fused where possible."""
        return emit_for_floats(self._builder, "llvm.fmuladd", x, y, z)

    def raise_top(self, tops: Any, query: int, scores: Any) -> None:
        top = self.read(tops, query * self.lanes)
        larger = self._builder.fcmp_ordered(">", scores, top)
        self.write(tops, query * self.lanes, self._builder.select(larger, scores, top))

    def turned(self, rows: list[Any]) -> list[Any]:
        """Transpose the rows: vector n of the result holds number n of each row.

        The first half of the rows is interleaved with the second, log2(lanes) times. With 16 rows a to p:

            a0 a1 ... | b0 b1 ... | ...   ->   a0 i0 a1 i1 ... | ... | b0 j0 b1 j1 ..."""
        half = self.lanes // 2
        dealt = [lane // 2 + lane % 2 * self.lanes for lane in range(self.lanes)]
        for _ in range(self.lanes.bit_length() - 1):
            pairs = list(zip(rows[:half], rows[half:], strict=True))
            rows = [self._shuffle(x, y, [lane + skip for lane in dealt]) for x, y in pairs for skip in (0, half)]
        return rows

    def halving_order(self) -> list[int]:
        """Return the lanes, ordered so that adding neighbours equals adding halves."""
        order = [0]
        while len(order) < self.lanes:
            order = [2 * place for place in order] + [2 * place + 1 for place in order]
        return order

    def push_whole(self, tree: list[tuple[int, Any]], vector: Any) -> None:
        """Add vectors, each with one lane's products, in the order in which `push` adds lanes."""
        part, vector = self.lanes, emit_fence(self._builder, vector)
        while tree and tree[-1][0] == part:
            vector = emit_fence(self._builder, self._builder.fadd(tree.pop()[1], vector))
            part //= 2
        tree.append((part, vector))

    def push(self, tree: list[tuple[int, Any]], vector: Any) -> None:
        """Sum each of `lanes` vectors over its lanes, into one vector.

        Two vectors of n-lane parts become one vector of n/2-lane parts, each the sum of a part's two halves. Fences
        keep the compiler from fusing the first addition with the last product.

            x0 x1 | x2 x3   and   y0 y1 | y2 y3   ->   x0+x2  x1+x3 | y0+y2  y1+y3"""
        part, vector = self.lanes, emit_fence(self._builder, vector)  # the products
        while tree and tree[-1][0] == part:
            vector = self._fold(tree.pop()[1], vector, part)
            part //= 2
        tree.append((part, vector))

    def _fold(self, x: Any, y: Any, part: int) -> Any:
        starts = range(0, 2 * self.lanes, part)
        lower = [start + i for start in starts for i in range(part // 2)]
        upper = [lane + part // 2 for lane in lower]
        return self._builder.fadd(self._shuffle(x, y, lower), self._shuffle(x, y, upper))

    def _shuffle(self, x: Any, y: Any, lanes: list[int]) -> Any:
        return self._builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))
