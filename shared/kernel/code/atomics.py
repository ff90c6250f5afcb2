"""Atomic operations, waits and calls by address, for compiled code. Addresses, and the words at them, are int64.

Operations are sequentially consistent: a thread that reads a written word also sees all earlier writes. add_to,
set_bits, keep_bits and exchange return the word's old value. Waiting uses Linux futexes on a word's lower half. `calls`
is the address of an int64 array with team.system_calls' result.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel.code.jit import emit_call, emitted, inlined, longs_at

FUTEX_WAIT, FUTEX_WAKE = 0, 1  # not the PRIVATE variants: processes share the words
EVERYBODY = 0x7FFFFFFF
MONOTONIC = 1  # CLOCK_MONOTONIC, which all processes share
_LONG = ir.IntType(64)


@emitted
def look_at(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@emitted
def put(typing_context: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _changing(operation: str) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw(operation, _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@emitted
def add_to(typing_context: Any, address: Any, value: Any) -> Any:
    return _changing("add")


@emitted
def set_bits(typing_context: Any, address: Any, bits: Any) -> Any:
    return _changing("or")


@emitted
def keep_bits(typing_context: Any, address: Any, bits: Any) -> Any:
    return _changing("and")


@emitted
def exchange(typing_context: Any, address: Any, value: Any) -> Any:
    return _changing("xchg")


@emitted
def change_if(typing_context: Any, address: Any, old: Any, new: Any) -> Any:
    """If the word is `old`, write `new`. Return whether the word was `old`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = _pointer(builder, args[0])
        return builder.extract_value(builder.cmpxchg(where, args[1], args[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@emitted
def call_task(typing_context: Any, task: Any, words: Any, share: Any, worker: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_LONG.as_pointer(), _LONG, _LONG])
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [_pointer(builder, args[1]), *args[2:]])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), codegen


@emitted
def call_system(typing_context: Any, function: Any, number: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the C library's `syscall`, whose address is `function`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_LONG, [_LONG] * 7)
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(function, [*args[1:], _LONG(0), _LONG(0)])

    return types.int64(*(types.int64,) * 6), codegen


@emitted
def read_clock(typing_context: Any, function: Any) -> Any:
    """Return CLOCK_MONOTONIC in nanoseconds. `function`: the address of `clock_gettime`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = cgutils.alloca_once(builder, _LONG, size=2)
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), _LONG.as_pointer()])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [ir.IntType(32)(MONOTONIC), pair])
        seconds = builder.load(pair)
        rest = builder.load(builder.gep(pair, [_LONG(1)]))
        return builder.add(builder.mul(seconds, _LONG(1_000_000_000)), rest)

    return types.int64(types.int64), codegen


@emitted
def address_of_time(typing_context: Any, nanoseconds: Any) -> Any:
    """Return the address of a timespec of `nanoseconds` (less than a second) on the caller's stack.

    The timespec is valid until the caller returns or calls this function again."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = cgutils.alloca_once(builder, _LONG, size=2)
        builder.store(_LONG(0), pair)
        builder.store(args[0], builder.gep(pair, [_LONG(1)]))
        return builder.ptrtoint(pair, _LONG)

    return types.int64(types.int64), codegen


@emitted
def rest_a_moment(typing_context: Any) -> Any:
    """Pause in a spin loop, so that the core's other hardware thread runs faster."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@inlined
def wait_for_change(calls: int, address: int, seen: int, most_ns: int) -> None:
    """Sleep while the word's lower half equals `seen`. The sleep may end early.

    `most_ns` (below one second) limits the sleep. 0 sets no limit."""
    timeout = address_of_time(most_ns) if most_ns > 0 else 0
    call_system(longs_at(calls)[0], longs_at(calls)[1], address, FUTEX_WAIT, seen & 0xFFFFFFFF, timeout)


@inlined
def wake_all(calls: int, address: int) -> None:
    if longs_at(calls)[0] != 0:
        call_system(longs_at(calls)[0], longs_at(calls)[1], address, FUTEX_WAKE, EVERYBODY, 0)


@inlined
def now_ns(calls: int) -> int:
    now: int = read_clock(longs_at(calls)[2])
    return now


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _LONG.as_pointer())
