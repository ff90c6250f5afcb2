"""Triton's interpreter, for tests of kernels on a CPU. A test imports it first, then its kernels:

    interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
    gate = interpreter.kernels("gate")  # shared.gpu_kernel.gate

Triton asks whether to interpret when it is imported and at every @triton.jit. It is told here, and by no environment
variable afterwards: a process that a test starts compiles.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import platform
import random
import re
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy
import pytest
from packaging.version import Version

if sys.platform != "linux" or platform.machine() != "x86_64":
    raise ImportError("kernels are interpreted on Linux x86-64 only")
if importlib.util.find_spec("triton") is None:
    raise ImportError("Triton is missing: pip install -r tests/requirements.txt")
if Version(importlib.metadata.version("triton")) < Version("3.7"):
    raise ImportError("Triton before 3.7 can't interpret beside numpy 2")

# transformers loads Triton, as a compiler. Its Python part is loaded a second time then; the compiled one is not.
LOADED_AGAIN = re.compile(r"triton(?!\._C\b)(\.|$)|shared\.gpu_kernel\.")
for name in filter(LOADED_AGAIN.match, list(sys.modules)):
    del sys.modules[name]
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    import triton
    from triton import knobs
    from triton.runtime import interpreter as grids
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(knobs, "propagate_env", False)
    knobs.runtime.interpret = True

assert isinstance(triton.language.sum, grids.InterpretedFunction)
ONE_GRID = threading.Lock()
run_grid = grids.GridExecutor.__call__


def run_alone(*args: Any, **options: Any) -> None:
    """Run one grid at a time: the interpreter puts its functions into the language while a grid runs, and keeps the
    program's place beside them. Two threads would leave them there, and nothing compiles afterwards.

    An exponential that overflows warns on no GPU; numpy's warning would be an error here."""
    with ONE_GRID, numpy.errstate(all="ignore"):
        run_grid(*args, **options)


class AllOfAGrid(grids._LangPatchScope):  # type: ignore[misc]
    """What a grid and the functions that its programs call, such as `tl.sum`, put into the language: taken out when the
    grid ends. Triton forgets what functions put in, and then whoever adds two numbers compiles no more."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = set[tuple[int, str]]()  # attributes whose value before the grid is kept

    def set_attr(self, owner: object, name: str, value: object) -> None:
        if (id(owner), name) in self.noted:
            setattr(owner, name, value)
        else:
            self.noted.add((id(owner), name))
            super().set_attr(owner, name, value)

    def restore(self) -> None:
        super().restore()
        self.noted.clear()


of_the_grid = AllOfAGrid()
grids._LangPatchScope = lambda: of_the_grid
grids.GridExecutor.__call__ = run_alone
# It copies tensors back to where they are: on a CPU onto themselves, which fills the memory of a sparse pool.
grids.GridExecutor._restore_args_dev = lambda *_: None


UNCHECKED = grids.InterpreterOptions(sanitize_overflow=False)  # looking for overflow takes two thirds of the time


def dot_in_order(left: Any, right: Any, sums: Any, *_: object) -> Any:
    """Multiply two tiles. Sum the products of every element in the same order, as a GPU does.

    numpy's order depends on a column's place in the tile, and on the processor."""
    terms = left.data[:, :, None].astype(sums.data.dtype) * right.data[None].astype(sums.data.dtype)
    return grids.TensorHandle(numpy.add.reduce(terms, axis=1) + sums.data, sums.dtype.scalar)


grids.interpreter_builder.create_dot = dot_in_order


def kernels(name: str) -> ModuleType:
    """Import a module of shared.gpu_kernel."""
    return importlib.import_module(f"shared.gpu_kernel.{name}")


@contextlib.contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Run the programs of every grid in an order drawn from `seed`: on a GPU they have none."""
    draw, order = random.Random(seed), iter(())
    builder = grids.interpreter_builder
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx

    def set_shuffled_dim(*dims: int) -> None:
        nonlocal order
        set_dim(*dims)
        places = list(itertools.product(*map(range, dims)))
        draw.shuffle(places)
        order = iter(places)

    builder.set_grid_dim = set_shuffled_dim
    builder.set_grid_idx = lambda *_: set_index(*next(order))
    try:
        yield
    finally:
        del builder.set_grid_dim, builder.set_grid_idx
