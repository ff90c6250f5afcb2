"""The one place that launches Triton kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction

from shared.core.errors import KernelRefused
from shared.gpu_kernel.launch.bound import BoundKernels
from shared.gpu_kernel.launch.signatures import Signature, kernel_name, signature_of

MAX_GRID = (2**31 - 1, 65535, 65535)
# rounding as on a CPU: a product and a sum are rounded separately, and subnormal numbers are kept
OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}

_recordings: list[set[Signature]] = []
_kernels = BoundKernels()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: object,
    num_warps: int = 4,
    num_stages: int = 2,
    max_registers: int | None = None,
    **constants: object,
) -> None:
    """Enqueue `kernel` on the current stream of the tensors' device. Raises KernelRefused.

    `grid`: programs in up to three dimensions; a 0 launches nothing. `max_registers`: limit per thread; None lets
    the compiler decide. `constants`: tl.constexpr parameters. With "meta" tensors the call is only recorded."""
    if 0 in grid:
        return
    sizes = check_grid(kernel, grid)
    key, values, bound = _kernels.look_up(kernel, args, (num_warps, num_stages, max_registers), constants)
    if bound is not None and not _recordings and bound.device == current_device():
        bound.start(sizes, driver.active.get_current_stream(bound.device), values)
        return
    device = device_of(kernel, args)
    if _recordings:
        signature = signature_of(kernel, args, constants, num_warps, num_stages, max_registers)
        for signatures in tuple(_recordings):
            signatures.add(signature)
    if device.type == "meta":
        return
    check_device(kernel, device)
    options = {"num_warps": num_warps, "num_stages": num_stages, **register_option(max_registers)}
    compiled = enqueue(kernel, grid, args, {**options, **constants})
    if compiled is not None:
        _kernels.keep(key, kernel, compiled, current_device(), constants, len(args))


def register_option(max_registers: int | None) -> dict[str, int]:
    return {} if max_registers is None else {"maxnreg": max_registers}


def enqueue(kernel: Any, grid: tuple[int, ...], args: tuple[object, ...], options: dict[str, object]) -> Any:
    """Return what Triton compiled; None if the kernel was interpreted. Tests replace this function by a virtual GPU."""
    try:
        return kernel[grid](*args, **OPTIONS, **options)
    except OutOfResources as error:
        raise KernelRefused(
            f"{kernel_name(kernel)} needs {error.required} of {error.name}, {device_of(kernel, args)} has only "
            f"{error.limit}: give it a smaller tile or fewer stages on this chip"
        ) from error


@contextlib.contextmanager
def recorded() -> Iterator[set[Signature]]:
    """Yield a set that collects the signatures of all threads' launches until the context ends."""
    signatures: set[Signature] = set()
    _recordings.append(signatures)
    try:
        yield signatures
    finally:
        _recordings[:] = [others for others in _recordings if others is not signatures]


def check_grid(kernel: Any, grid: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the grid in three dimensions. Raises KernelRefused."""
    x, y, z, *_ = *grid, 1, 1  # no loop: the host runs this at every launch
    is_inside = 0 <= x <= MAX_GRID[0] and 0 <= y <= MAX_GRID[1] and 0 <= z <= MAX_GRID[2]
    if len(grid) > len(MAX_GRID) or not is_inside:
        raise KernelRefused(
            f"{kernel_name(kernel)}: a grid of {grid} programs, but CUDA takes at most {MAX_GRID}: "
            "put the long dimension first, or give a program more to do"
        )
    return x, y, z


def device_of(kernel: Any, args: tuple[object, ...]) -> torch.device:
    """Return the tensors' device. Raise KernelRefused for two devices, or if a tensor begins inside an element."""
    device = None
    for name, value in zip(kernel.arg_names, args, strict=False):
        if not isinstance(value, torch.Tensor):
            continue
        if device is not None and value.device != device:
            raise KernelRefused(
                f"{kernel_name(kernel)}: {name} is on {value.device}, others are on {device}: copy it there first"
            )
        device = value.device
        if value.data_ptr() % value.element_size():
            raise KernelRefused(
                f"{kernel_name(kernel)}: {name} begins between two elements of {value.element_size()} bytes: "
                "cut the view where an element begins"
            )
    if device is None:
        raise KernelRefused(f"{kernel_name(kernel)} gets no tensor: nothing says on which device it runs")
    return device


def check_device(kernel: Any, device: torch.device) -> None:
    """Raise KernelRefused unless the tensors are on the current device, where Triton always launches."""
    if isinstance(kernel, InterpretedFunction):
        return
    if device.type == "cpu":
        raise KernelRefused(f"{kernel_name(kernel)} has tensors of a CPU: Triton kernels run on a GPU")
    current = current_device()
    if device.index != current:
        raise KernelRefused(
            f"{kernel_name(kernel)}: its tensors are on {device}, device {current} is the current one: "
            "launch it inside the stream of its own device"
        )


def current_device() -> int:
    device: int = driver.active.get_current_device()
    return device
