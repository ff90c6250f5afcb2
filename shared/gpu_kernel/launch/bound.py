"""Find a kernel's machine code once per signature, and launch it without Triton's binder.

Triton binds, specialises and looks up at every launch, which takes the host longer than most kernels run. The first
launch with a signature goes through Triton. What it compiled is kept under a key: all that Triton may compile in, and
all that the launcher checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shared.gpu_kernel.launch.signatures import ALIGNMENT, INT32, unspecialised_of

Key = tuple[object, ...]
Reader = Callable[..., tuple[Key, tuple[object, ...]]]
MISPLACED = ALIGNMENT - 1  # mask of an address's bytes behind a multiple of ALIGNMENT
# How a reader names argument {n} in its key. Of an int of 32 bits: whether it is 1, and whether it is aligned.
TENSOR, FREE, NUMBER, FLOAT, OTHER = "tensor", "free", "number", "float", "other"
IS_INT32 = f"type(a{{n}}) is int and {INT32.start} <= a{{n}} < {INT32.stop}"
PARTS = {
    TENSOR: f"a{{n}}.dtype, p{{n}} & {MISPLACED}, a{{n}}.get_device()",
    FREE: f"({IS_INT32}) or named(a{{n}})",
    NUMBER: f"(a{{n}} == 1, a{{n}} & {MISPLACED} == 0) if {IS_INT32} else named(a{{n}})",
    FLOAT: "type(a{n}) is float or named(a{n})",
    OTHER: "named(a{n})",
}


class OtherKind(Exception):
    """An argument is a tensor where the reader's launch had none, or the other way round."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`run`: launches `function` on `device`. `constants`: the kernel's last parameters, in order."""

    run: Any
    function: Any
    metadata: Any
    device: int
    constants: tuple[object, ...]

    def start(self, grid: tuple[int, int, int], stream: int, values: tuple[object, ...]) -> None:
        """`values`: an address for each tensor, and the numbers, in the parameters' order."""
        # None: no metadata for profilers, and no hooks
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *values, *self.constants)


class BoundKernels:
    """Holds what was compiled in this process, by kernel and key."""

    def __init__(self) -> None:
        # By id, because a kernel's hash is computed from its source. The kernel is kept, so that its id stays its own.
        self._readers: dict[int, tuple[Any, Reader]] = {}
        self._bound: dict[Key, Bound] = {}

    def look_up(
        self, kernel: Any, args: tuple[object, ...], options: Key, constants: dict[str, object]
    ) -> tuple[Key, tuple[object, ...], Bound | None]:
        """Return the launch's key, its values, and what was kept under this key."""
        number = id(kernel)
        try:
            parts, values = self._readers[number][1](*args)
        except (KeyError, AttributeError, OtherKind):
            reader = make_reader(kinds_of(kernel, args))
            self._readers[number] = kernel, reader
            parts, values = reader(*args)
        key = (number, options, tuple(constants), tuple(constants.values()), parts)
        return key, values, self._bound.get(key)

    def keep(self, key: Key, kernel: Any, compiled: Any, device: int, constants: dict[str, object], num: int) -> None:
        """Keep the machine code of a launch with `num` positional arguments."""
        last = tuple(constants[name] for name in kernel.arg_names[num:])
        self._bound[key] = Bound(compiled.run, compiled.function, compiled.packed_metadata, device, last)


def kinds_of(kernel: Any, args: tuple[object, ...]) -> tuple[str, ...]:
    unspecialised = unspecialised_of(kernel)
    kinds = []
    for place, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(value, torch.Tensor):
            kinds.append(TENSOR)
        elif type(value) is int:
            kinds.append(FREE if {place, name} & unspecialised else NUMBER)
        else:
            kinds.append(FLOAT if type(value) is float else OTHER)
    return tuple(kinds)


def named(value: object) -> object:
    """Return the part of a key for any argument but a tensor. Raises OtherKind."""
    if isinstance(value, torch.Tensor):
        raise OtherKind
    return type(value), value


@functools.cache
def make_reader(kinds: tuple[str, ...]) -> Reader:
    """Return a function of arguments of these kinds: their part of the key, and their values.

    Its code has no loop, because the host runs it at every launch."""
    names = [f"a{n}" for n in range(len(kinds))]
    addresses = [f"    p{n} = a{n}.data_ptr()" for n, kind in enumerate(kinds) if kind == TENSOR]
    parts = "".join(f"{PARTS[kind].format(n=n)}, " for n, kind in enumerate(kinds))
    values = "".join(f"p{n}, " if kind == TENSOR else f"a{n}, " for n, kind in enumerate(kinds))
    source = "\n".join((f"def read({', '.join(names)}):", *addresses, f"    return ({parts}), ({values})"))
    found: dict[str, Any] = {"named": named}
    exec(source, found)  # noqa: S102 (the source is made of numbers and the texts above)
    reader: Reader = found["read"]
    return reader
