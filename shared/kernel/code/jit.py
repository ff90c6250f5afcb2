"""Compiles our numba kernels, and adds the few scalar operations that numba lacks.

docs/cpu-kernels.md says why kernels take addresses. Functions such as `floats_at` turn an int64 address into a typed
pointer. The caller holds the tensors until the call returns, and nothing checks bounds. `is_half` means bfloat16
instead of float32.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import config
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic

from shared.core import sampling_params
from shared.kernel.code.kept_code import keep_code

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
C = TypeVar("C")
R = TypeVar("R")
# The compiler may split a sum into the processor's lanes, but not in sums.py. NaN and infinity are kept.
# "arcp" is left out: it would make 1 / sqrt(x) an approximation, whose bits differ between Intel and AMD.
FAST_MATH = {"reassoc", "contract", "nsz"}
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
EXP_TERMS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)
TANH_TERMS = (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3)
NEAR_ZERO = 0.3  # where the series ends
WORDS = types.CPointer(types.int64)
TASK = types.void(WORDS, types.int64, types.int64)
NUM_ROWS, NUM_SHARES = 0, 1  # the first words of every task

_f32, _i32, _u16, _u32 = np.float32, np.int32, np.uint16, np.uint32


def kernel(**options: Any) -> Callable[[F], F]:
    """Compile a kernel over arrays (sampler, HashLM) that runs without the GIL."""

    def decorate(function: F) -> F:
        stamp_name(function)
        settings = {"nogil": True, "fastmath": FAST_MATH, "error_model": "numpy", **options}
        compiled: F = njit(**settings)(function)
        keep_code(compiled, function)
        return compiled

    return decorate


@functools.cache
def processor_features() -> dict[str, bool]:
    """Return the processor features that compiled code may use."""
    settings: Any = config
    name, features = settings.CPU_NAME, settings.CPU_FEATURES
    if features is not None:
        return {feature[1:]: feature[0] == "+" for feature in features.split(",") if feature}
    return dict(llvm.get_host_cpu_features()) if name in (None, "host") else {}


@functools.cache
def is_zen() -> bool:
    """Return whether this is an AMD Zen, whose first cache can wait for few lines."""
    settings: Any = config
    name = settings.CPU_NAME
    return str(llvm.get_host_cpu_name() if name in (None, "host") else name).startswith("znver")


def compile_task(function: Callable[[Any, int, int], None]) -> Any:
    """Compile a C function for a Program. The caller keeps the result alive while its `address` is used.

    The function gets the task's int64 words, the share's number, and the thread's number, which picks the scratch.
    Shares may run at the same time, in any order, on any thread."""
    return compile_c(function, TASK)


def compile_exact_task(function: Callable[[Any, int, int], None]) -> Any:
    """Compile a task that rounds every float operation as written."""
    return compile_c(function, TASK, exact=True)


def compile_c(function: Callable[..., None], signature: Any, exact: bool = False) -> Any:
    """Compile a C function, or load its code from disk.

    Closures may hold only numbers, which are part of the cache key."""
    stamp_name(function)
    fast: Any = False if exact else FAST_MATH
    made = CFunc(
        function, normalize_signature(signature), locals={}, options={"fastmath": fast, "error_model": "numpy"}
    )
    keep_code(made, function)  # `numba.cfunc` would have compiled already
    made.compile()
    return made


def stamp_name(function: Callable[..., Any]) -> None:
    """Extend the function's name in the disk cache by checksums of the sources in its folder and in shared/kernel.

    numba checks only the function's own file, and would reuse stale inlined code and columns of the table."""
    own, here = Path(function.__code__.co_filename).parent, Path(__file__).parents[1]
    table = zlib.crc32(Path(sampling_params.__file__).read_bytes(), sources_stamp(here, "**/*.py"))
    beside = 0 if own.is_relative_to(here) else sources_stamp(own, "*.py")
    function.__qualname__ += f"_{beside:08x}_{table:08x}"


@functools.cache
def sources_stamp(folder: Path, pattern: str) -> int:
    stamp = 0
    for path in sorted(folder.glob(pattern)):
        stamp = zlib.crc32(path.read_bytes(), stamp)
    return stamp


def inlined(function: F) -> F:
    """Inline a part into its caller. Its loops over constants are unrolled."""
    compiled = njit(nogil=True, fastmath=FAST_MATH, error_model="numpy", forceinline=True)(function)
    return compiled  # type: ignore[return-value]  # numba's Dispatcher is called like the function


def copied(function: F) -> F:
    """Copy a part into its caller before types are inferred, so that constants stay constants for emitted code."""
    settings: Any = {"nogil": True, "fastmath": FAST_MATH, "error_model": "numpy", "inline": "always"}
    made: F = njit(**settings)(function)
    return made


def emitted(function: Callable[Concatenate[C, P], R]) -> Callable[P, R]:
    """Make a part from LLVM code. numba passes the first argument, the typing context."""
    return intrinsic(function)  # type: ignore[return-value]  # the stubs ask callers for the context


def emitted_for_constants(function: Callable[Concatenate[C, P], R]) -> Callable[P, R]:
    """As `emitted`, with separate code for each set of constants."""
    made = intrinsic(prefer_literal=True)(function)
    return made  # type: ignore[return-value]  # as above


def _pointer(address: Any, item: types.Type) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(item)(address), codegen


@emitted
def floats_at(typing_context: Any, address: Any) -> Any:
    return _pointer(address, types.float32)


@emitted
def halves_at(typing_context: Any, address: Any) -> Any:
    """Return a pointer to bfloat16 numbers, as uint16."""
    return _pointer(address, types.uint16)


@emitted
def ints_at(typing_context: Any, address: Any) -> Any:
    return _pointer(address, types.int32)


@emitted
def longs_at(typing_context: Any, address: Any) -> Any:
    return _pointer(address, types.int64)


@emitted
def bits_of(typing_context: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@emitted
def float_of(typing_context: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@emitted
def prefetch(typing_context: Any, address: Any) -> Any:
    """This never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def emit_call(builder: Any, name: str, result: ir.Type, operands: list[Any]) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, operands)


def emit_for_floats(builder: Any, name: str, *operands: Any) -> Any:
    kind = operands[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    return emit_call(builder, f"{name}.{suffix}", kind, list(operands))


def emit_fence(builder: Any, value: Any) -> Any:
    """Keep the compiler from regrouping or fusing float operations across this value."""
    return emit_for_floats(builder, "llvm.arithmetic.fence", value)


def emit_prefetch(builder: Any, address: Any, num_bytes: int = 0) -> None:
    byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    read, locality, data = word(0), word(2 if is_zen() else 3), word(1)
    operands = [builder.gep(builder.inttoptr(address, byte_pointer), [ir.IntType(64)(num_bytes)])]
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), [*operands, read, locality, data])


@inlined
def from_half(bits: np.uint16) -> np.float32:
    """bfloat16 bits -> float32."""
    number: np.float32 = float_of(_u32(_u32(bits) << _u32(16)))
    return number


@inlined
def to_half(value: np.float32) -> np.uint16:
    """Round float32 to the nearest bfloat16 bits, ties to even; NaN stays NaN."""
    bits = bits_of(value)
    rounded = _u32(_u32(bits + _u32(0x7FFF)) + _u32((bits >> _u32(16)) & _u32(1)))
    return _u16(0x7FC0) if value != value else _u16(rounded >> _u32(16))


@inlined
def exp32(value: np.float32) -> np.float32:
    """Return exp(value) for value < 88, within 3 units in the last place. Below -87 return exp(-87)."""
    value = max(value, _f32(-87.0))
    power = np.floor(value * _f32(LOG2E) + _f32(0.5))
    rest = (value - power * _f32(LN2_HIGH)) - power * _f32(LN2_LOW)
    series = _f32(EXP_TERMS[0])
    for k in range(1, 6):
        series = series * rest + _f32(EXP_TERMS[k])
    total = series * rest * rest + rest + _f32(1.0)
    raised: np.float32 = total * float_of(_u32(_u32(_i32(power) + _i32(127)) << _u32(23)))
    return raised


@inlined
def tanh32(value: np.float32) -> np.float32:
    """Return tanh(value) within 4 units in the last place. Near 0 a series, because 1 - exp(-2 x) has few digits
    there."""
    size = abs(value)
    small = exp32(_f32(-2.0) * size)
    far = (_f32(1.0) - small) / (_f32(1.0) + small)
    square = size * size
    series = _f32(TANH_TERMS[0])
    for k in range(1, 5):
        series = series * square + _f32(TANH_TERMS[k])
    near = series * square * size + size
    result = near if size < _f32(NEAR_ZERO) else far
    signed: np.float32 = -result if value < _f32(0.0) else result
    return signed


@inlined
def load(address: int, index: int, is_half: bool) -> np.float32:
    """`is_half` must be a constant."""
    return from_half(halves_at(address)[index]) if is_half else floats_at(address)[index]


@inlined
def store(address: int, index: int, value: np.float32, is_half: bool) -> None:
    if is_half:
        halves_at(address)[index] = to_half(value)
    else:
        floats_at(address)[index] = value


@inlined
def part_of(total: int, index: int, count: int) -> tuple[int, int]:
    """Return the first item and the end of one of `count` even parts."""
    return total * index // count, total * (index + 1) // count


@inlined
def rows_of(words: Any, share: int) -> tuple[int, int]:
    return part_of(words[NUM_ROWS], share, words[NUM_SHARES])
