"""Two inner loops of attention as vector code, written for LLVM by hand; numba inlines them where they are called.

Left to itself the compiler keeps sums in memory and adds up each product's lanes on its own, twice the work. Both work
on a block of `lanes` keys or values, each at an address of its own, so pages of any size look the same.

    lanes: 16 where head_dim is a multiple of it, else 8 or 4; D / lanes vectors hold one head
    dot(q, k): lane l sums q[l + lanes * j] k[l + lanes * j] over j, then halves are added until one lane is left
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from shared.kernel.jit import emitted_for_constants

FLOAT, LONG = ir.FloatType(), ir.IntType(64)
QUERY_REGISTERS, SUM_REGISTERS = 16, 20  # of 32 vector registers: what may hold queries, and what sums


def block_lanes(head_dim: int) -> int:
    """Vector width for a head, 0 if there is none."""
    return next((lanes for lanes in (16, 8, 4) if head_dim % lanes == 0), 0)


@emitted_for_constants
def score_block(
    typing_context: Any,
    group: Any,
    head_dim: Any,
    is_half: Any,
    queries: Any,
    keys: Any,
    out: Any,
    stride: Any,
    tops: Any,
) -> Any:
    """Products of a group's queries with one block of keys. Constants: group, head_dim, is_half. Addresses:

    queries (group, D) float32; keys (lanes,) int64 addresses; out: row g of scores is at out + g * stride bytes, lanes
    float32 are written; tops (group, lanes) float32, raised to the scores where these are larger.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Vectors(builder, head_dim.literal_value, bool(is_half.literal_value))
        _, _, _, queries_at, keys_at, out_at, stride_bytes, tops_at = args
        chunk = max(1, QUERY_REGISTERS // code.per_head)
        for first in range(0, group.literal_value, chunk):
            heads = range(first, min(first + chunk, group.literal_value))
            vectors = {g: code.read_floats(queries_at, g * code.head_dim) for g in heads}
            trees: dict[int, list[tuple[int, Any]]] = {g: [] for g in heads}
            for lane in range(code.lanes):
                key = code.read_items(code.read_long(keys_at, lane))
                for g in heads:
                    code.push(trees[g], code.dot(vectors[g], key))
            for g in heads:
                scores = trees[g][0][1]
                code.write(code.offset(out_at, builder.mul(stride_bytes, LONG(g))), 0, scores)
                top = code.read(tops_at, g * code.lanes)
                larger = builder.fcmp_ordered(">", scores, top)
                code.write(tops_at, g * code.lanes, builder.select(larger, scores, top))
        return context.get_dummy_value()

    return _block_signature(group, head_dim, is_half, queries, keys, out, stride, tops), codegen


@emitted_for_constants
def weigh_block(
    typing_context: Any, group: Any, head_dim: Any, is_half: Any, weights: Any, stride: Any, values: Any, sums: Any
) -> Any:
    """Adds one block of weighted values to a group's sums. Constants: group, head_dim, is_half. Addresses:

    weights: row g is at weights + g * stride bytes, lanes float32; values (lanes,) int64 addresses; sums (group, D)
    float32, changed in place, value by value in their order.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Vectors(builder, head_dim.literal_value, bool(is_half.literal_value))
        _, _, _, weights_at, stride_bytes, values_at, sums_at = args
        chunk = max(1, SUM_REGISTERS // code.per_head)
        for first in range(0, group.literal_value, chunk):
            heads = range(first, min(first + chunk, group.literal_value))
            totals = {g: code.read_floats(sums_at, g * code.head_dim) for g in heads}
            rows = {g: code.offset(weights_at, builder.mul(stride_bytes, LONG(g))) for g in heads}
            for lane in range(code.lanes):
                value = code.read_items(code.read_long(values_at, lane))
                for g in heads:
                    weight = code.splat(rows[g], lane)
                    totals[g] = [code.add_product(weight, v, t) for v, t in zip(value, totals[g], strict=True)]
            for g in heads:
                for j, total in enumerate(totals[g]):
                    code.write(sums_at, g * code.head_dim + j * code.lanes, total)
        return context.get_dummy_value()

    return _block_signature(group, head_dim, is_half, weights, stride, values, sums), codegen


def _block_signature(group: Any, head_dim: Any, is_half: Any, *addresses: Any) -> Any:
    if not all(isinstance(constant, types.Literal) for constant in (group, head_dim, is_half)):
        raise TypeError("group, head_dim and is_half must be constants where a block is used")
    return types.void(group, head_dim, is_half, *(types.int64 for _ in addresses))


class _Vectors:
    """Writes vector code of one block. Indices count float32 (or the pool's items), addresses are int64 values."""

    def __init__(self, builder: Any, head_dim: int, is_half: bool) -> None:
        self._builder, self._is_half = builder, is_half
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
        """One head of float32."""
        return [self.read(address, first + j * self.lanes) for j in range(self.per_head)]

    def read_items(self, address: Any) -> list[Any]:
        """One head of the pool, widened to float32: a bfloat16 is the upper half of one."""
        if not self._is_half:
            return self.read_floats(address, 0)
        halves, words = (ir.VectorType(ir.IntType(bits), self.lanes) for bits in (16, 32))
        upper = ir.Constant(words, [16] * self.lanes)
        vectors = []
        for j in range(self.per_head):
            bits = self._builder.load(self._at(address, 2 * j * self.lanes, halves), align=2)
            wide = self._builder.shl(self._builder.zext(bits, words), upper)
            vectors.append(self._builder.bitcast(wide, self._type))
        return vectors

    def splat(self, address: Any, index: int) -> Any:
        """One float32 in every lane."""
        scalar = self._builder.load(self._at(address, 4 * index, FLOAT), align=4)
        first = self._builder.insert_element(ir.Constant(self._type, ir.Undefined), scalar, ir.IntType(32)(0))
        return self._shuffle(first, first, [0] * self.lanes)

    def dot(self, left: list[Any], right: list[Any]) -> Any:
        """Lane by lane; what is left to add up are the lanes."""
        total = self._builder.fmul(left[0], right[0])
        for x, y in zip(left[1:], right[1:], strict=True):
            total = self.add_product(x, y, total)
        return total

    def add_product(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, fused where the processor can."""
        name = f"llvm.fmuladd.v{self.lanes}f32"
        kind = ir.FunctionType(self._type, [self._type] * 3)
        function = self._builder.module.globals.get(name) or ir.Function(self._builder.module, kind, name)
        return self._builder.call(function, [x, y, z])

    def push(self, tree: list[tuple[int, Any]], vector: Any) -> None:
        """Adds up the lanes of `lanes` vectors at once: two vectors of n-lane parts become one of n/2-lane parts, whose
        lanes are sums of opposite halves. A binary counter of parts keeps few vectors alive.

            x0 x1 | x2 x3   and   y0 y1 | y2 y3   ->   x0+x2  x1+x3 | y0+y2  y1+y3
        """
        part = self.lanes
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
