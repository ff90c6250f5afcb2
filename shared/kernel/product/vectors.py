"""Vectors of attention's inner loops (simd.py): how they are read, multiplied and added."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from shared.kernel.code.items import Items, magnitude_bits, widened
from shared.kernel.code.jit import emit_call, emit_fence, emit_for_floats
from shared.kernel.product.product import STEPS, SUMS, has_pair_products, lower_halves, multiply_pairs, upper_halves

FLOAT, LONG = ir.FloatType(), ir.IntType(64)


def block_lanes(head_dim: int) -> int:
    """Return how many float32 lanes a head's vectors have, or 0 if no width divides head_dim."""
    return next((lanes for lanes in (16, 8, 4) if head_dim % lanes == 0), 0)


def are_paired(items: Items) -> bool:
    """Return whether one instruction multiplies pairs."""
    return items == Items.PAIRS and has_pair_products()


def number_bytes_of(items: Items) -> int:
    """Return the size of a query's number and of a weight."""
    return 2 if are_paired(items) else 4


class Vectors:
    """Indices count float32 numbers, pairs or the pool's items. Addresses are int64."""

    def __init__(self, builder: Any, head_dim: int, items: Items) -> None:
        self._builder, self._items = builder, items
        self._is_paired = are_paired(items)
        self.head_dim = head_dim
        self.words = head_dim // 2 if self._is_paired else head_dim  # of a query or transposed key
        self.lanes = block_lanes(head_dim)
        self.per_head, self.per_sum = self.words // self.lanes, head_dim // self.lanes
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

    def read_floats(self, address: Any, first: int, count: int) -> list[Any]:
        return [self.read(address, first + j * self.lanes) for j in range(count)]

    def read_block(self, addresses: Any, scales: Any, lane: int) -> list[Any]:
        scale = self.read_long(scales, lane) if self._items.has_scales else None
        return self.read_items(self.read_long(addresses, lane), scale)

    def read_items(self, address: Any, scale: Any = None) -> list[Any]:
        """Read one head as float32, or as pairs. Bytes are widened, then multiplied by the scale at `scale`."""
        if self._items == Items.FLOATS or self._is_paired:
            return self.read_floats(address, 0, self.per_head)
        return self.split(address) if self._items == Items.PAIRS else self._widened(address, scale)

    def _widened(self, address: Any, scale: Any) -> list[Any]:
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

    def split(self, address: Any) -> list[Any]:
        """Of each 16 pairs, return the second numbers, then the first, as float32."""
        pairs = [self._builder.bitcast(vector, STEPS) for vector in self._read_pairs(address, SUMS)]
        halves = [half(self._builder, vector) for vector in pairs for half in (upper_halves, lower_halves)]
        return [self._builder.bitcast(vector, self._type) for vector in halves]

    def _read_pairs(self, address: Any, kind: Any) -> list[Any]:
        places = [self._at(address, 64 * j, kind) for j in range(self.head_dim // 32)]
        return [self._builder.load(place, align=4) for place in places]

    def value_order(self) -> list[int]:
        if self._is_paired:
            return list(range(self.lanes // 2))
        swap = int(self._items == Items.PAIRS)
        return [lane ^ swap for lane in range(self.lanes)]

    def read_value(self, addresses: Any, scales: Any, place: int) -> list[Any]:
        """Read a value as float32, or a pair of values as `per_sum` vectors of pairs."""
        if self._is_paired:
            return self._pair_of_values(addresses, place)
        if self._items == Items.PAIRS:
            return self._widened(self.read_long(addresses, place), None)
        return self.read_block(addresses, scales, place)

    def _pair_of_values(self, addresses: Any, place: int) -> list[Any]:
        kind, order = ir.VectorType(ir.IntType(16), 32), [n // 2 + n % 2 * 32 for n in range(32)]
        first, second = (self._read_pairs(self.read_long(addresses, 2 * place + n), kind) for n in range(2))
        dealt = [[lane + skip for lane in order] for skip in (0, 16)]
        pairs = [self._shuffle(x, y, lanes) for x, y in zip(first, second, strict=True) for lanes in dealt]
        return [self._builder.bitcast(vector, self._type) for vector in pairs]

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
        if self._is_paired:
            total = self.add_product(left[0], right[0], self.all(0.0))
        else:
            total = self._builder.fmul(left[0], right[0])
        for x, y in zip(left[1:], right[1:], strict=True):
            total = self.add_product(x, y, total)
        return total

    def add_product(self, x: Any, y: Any, z: Any) -> Any:
        """Return x * y + z, fused where possible; of pairs, the sum of both products and z."""
        if self._is_paired:
            return multiply_pairs(self._builder, z, x, y)
        return emit_for_floats(self._builder, "llvm.fmuladd", x, y, z)

    def raise_top(self, tops: Any, query: int, scores: Any) -> None:
        top = self.read(tops, query * self.lanes)
        larger = self._builder.fcmp_ordered(">", scores, top)
        self.write(tops, query * self.lanes, self._builder.select(larger, scores, top))

    def transposed(self, rows: list[Any]) -> list[Any]:
        """Transpose the rows: interleave the first half with the second, log2(lanes) times."""
        half = self.lanes // 2
        dealt = [lane // 2 + lane % 2 * self.lanes for lane in range(self.lanes)]
        for _ in range(self.lanes.bit_length() - 1):
            pairs = list(zip(rows[:half], rows[half:], strict=True))
            rows = [self._shuffle(x, y, [lane + skip for lane in dealt]) for x, y in pairs for skip in (0, half)]
        return rows

    def settle(self, tree: list[tuple[int, Any]]) -> None:
        """Keep the compiler from moving additions to the end, where it runs out of registers (with pairs only)."""
        if self._is_paired:
            part, vector = tree.pop()
            kind = ir.FunctionType(vector.type, [vector.type])
            code = ir.InlineAsm(kind, "", "=v,0,~{memory}", side_effect=True)  # no instruction
            tree.append((part, self._builder.call(code, [vector])))

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

        Two vectors of n-lane parts become one of n/2-lane parts, each the sum of a part's halves. Fences keep the
        compiler from fusing the first addition with the last product."""
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
