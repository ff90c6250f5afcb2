"""Emits parts of amx_product.py's jobs."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils

from shared.kernel.code.jit import emitted_for_constants
from shared.kernel.product import amx
from shared.kernel.product.block_code import BlockEmitter, BlockForm
from shared.kernel.product.block_weights import CODE_BLOCK
from shared.kernel.product.packed_codes import HALF_BLOCKS, STRIP_BYTES, CodedColumns
from shared.kernel.product.product import COLUMNS, LONG, STEPS, SUMS, read_at, round_to_half, write_at


@emitted_for_constants
def add_registers(
    typing_context: Any, kind: Any, x: Any, x_stride: Any, index: Any, depth: Any, step: Any, dots: Any, count: Any,
    before: Any, before_stride: Any, after: Any, after_stride: Any,
) -> Any:  # fmt: skip
    """Emit code that scales amx.store_registers' integers, and adds them to the sums of `count` rows.

    Constant: kind. Addresses: x, step (the block's weights), before (sums or biases), after (sums, or results of the
    last block)."""
    if not isinstance(kind, types.Literal):
        raise TypeError("kind must be a constant")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = AmxCode(builder, BlockForm.unpacked(kind.literal_value))
        code.add_rows(LONG(0), args[7], *args[1:7], *args[8:])
        return context.get_dummy_value()

    return types.void(kind, *(types.int64,) * 11), codegen


@emitted_for_constants
def unpack_codes(typing_context: Any, kind: Any, step: Any, out: Any) -> Any:
    """Emit code that writes numbers of the tile's first half, as block_product.py packs 8 bits. Constant: kind."""
    if not isinstance(kind, types.Literal):
        raise TypeError("kind must be a constant")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, step_at, out_at = args
        code = AmxCode(builder, BlockForm.unpacked(kind.literal_value))
        with cgutils.for_range(builder, LONG(code.kind.block // amx.ROW_BYTES)) as loop:
            code.unpack_part(step_at, LONG(0), loop.index, out_at)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64), codegen


@emitted_for_constants
def multiply_beside(
    typing_context: Any, kind: Any, rows: Any, low_rows: Any, row_bytes: Any, numbers: Any, next_step: Any,
    next_half: Any, x: Any, index: Any, depth: Any, step: Any, dots: Any, count: Any, before: Any,
    before_stride: Any, after: Any, after_stride: Any,
) -> Any:  # fmt: skip
    """Emit amx.multiply_registers, and beside each 64 inputs a share of another job's add_registers. Unless `next_step`
    is 0, half a tile of it replaces the numbers."""
    if not isinstance(kind, types.Literal):
        raise TypeError("kind must be a constant")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, rows_at, low_rows_at, stride, numbers_at, next_at, half, x_at, *others = args
        block_index, num_blocks, step_at, dots_at, count, *places = others
        code = AmxCode(builder, BlockForm.unpacked(kind.literal_value))
        each = LONG(-(-amx.ROWS // (code.kind.block // amx.ROW_BYTES)))

        def work(part: Any) -> None:
            if code.kind.in_codes:
                with builder.if_then(builder.icmp_signed("!=", next_at, LONG(0))):
                    code.unpack_part(next_at, half, part, numbers_at)
            begin = builder.mul(part, each)
            end = builder.add(begin, each)
            end = builder.select(builder.icmp_signed("<", end, count), end, count)
            code.add_rows(begin, end, x_at, stride, block_index, num_blocks, step_at, dots_at, *places)

        planes = (rows_at, low_rows_at)[: code.kind.input_bytes]
        amx.emit_products(builder, code.kind.block, planes, stride, numbers_at, work)
        return context.get_dummy_value()

    return types.void(kind, *(types.int64,) * 16), codegen


class AmxCode(BlockEmitter):
    def add_rows(self, begin: Any, end: Any, *job: Any) -> None:
        """Emit add_registers for rows [begin, end). `job`: its other arguments."""
        block_index, num_blocks = job[2:4]
        is_last = self._builder.icmp_signed("==", block_index, self._builder.sub(num_blocks, LONG(1)))
        with self._builder.if_else(is_last) as (then, otherwise):
            with then:
                self._add_rows(self.kind.out_half, begin, end, *job)
            with otherwise:
                self._add_rows(False, begin, end, *job)

    def _add_rows(
        self, to_half: bool, begin: Any, end: Any, x_at: Any, row_bytes: Any, block_index: Any, num_blocks: Any,
        step_at: Any, dots_at: Any, before_at: Any, before_bytes: Any, after_at: Any, after_bytes: Any,
    ) -> None:  # fmt: skip
        build, kind = self._builder, self.kind
        item, together = 2 if to_half else 4, amx.SUMS // kind.input_bytes
        scales = [self.scale(step_at, b) for b in range(together)]
        with cgutils.for_range(build, build.sub(end, begin)) as loop:
            index = build.add(begin, loop.index)
            first = x_at, before_at, after_at, dots_at
            strides = row_bytes, before_bytes, after_bytes, LONG(amx.ROW_BYTES)
            own = [build.add(at, build.mul(index, stride)) for at, stride in zip(first, strides, strict=True)]
            x_row, before, after, dots = own
            row = self.row_block(x_row, block_index, num_blocks)
            unit, starts = self.splat(row.unit), self.starts(row)
            for b, scale in enumerate(scales):
                places = [LONG((n * together + b) * amx.REGISTER_BYTES) for n in range(kind.input_bytes)]
                read = [read_at(build, dots, place, STEPS) for place in places]
                dot = self.joined([build.add(start, one) for start, one in zip(starts, read, strict=True)])
                total = read_at(build, before, LONG(4 * COLUMNS * b), SUMS)
                total = self.add_block(unit, None, dot, scale, None, total)
                value = round_to_half(build, total) if to_half else total
                write_at(build, after, value, item, item * COLUMNS * b)

    def unpack_part(self, step_at: Any, half: Any, index: Any, out_at: Any) -> None:
        build, num_strips = self._builder, amx.ROW_BYTES // CODE_BLOCK
        for n in range(num_strips):
            part = build.add(build.mul(index, LONG(num_strips)), LONG(n))
            strip = build.add(part, build.mul(half, LONG(self.kind.num_parts)))
            self.fetch_strip(step_at, strip)
            strip_at = build.add(step_at, build.mul(strip, LONG(STRIP_BYTES)))
            target = build.add(out_at, build.mul(part, LONG(CODE_BLOCK * COLUMNS)))
            for b in range(HALF_BLOCKS):
                for quad, numbers in enumerate(CodedColumns(build, strip_at, b).quads()):
                    write_at(build, target, numbers, num_bytes=b * self.kind.block * COLUMNS + quad * 64)
