"""Triton's kernels on a virtual GPU: launched as torch's operators are, and interpreted when the device comes to them.

    with kernels_on(gpu):
        core = make_core(kind, gpu, kernels="triton", graphs=True)

A kernel is compiled at its first launch with a signature: a capture refuses that. Which of its tensors a kernel writes
nobody knows, so the race detector hears of reads alone: use devices that do not defer, or do not sanitize.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shared.kernel.product import libraries
from tests.support.kernels import interpreter
from tests.support.virtual_gpu.blocks import on_host
from tests.support.virtual_gpu.device import VirtualGpu
from tests.support.virtual_gpu.operators import KIND, is_ours

launcher, signatures = interpreter.kernels("launch.launcher"), interpreter.kernels("launch.signatures")
OF_TRITON = ("num_warps", "num_stages", "maxnreg")


@contextmanager
def kernels_on(gpu: VirtualGpu) -> Iterator[None]:
    """Sampler, relay and launcher take the device for one that runs Triton's kernels. Overflow of whole numbers is not
    looked for, which takes two thirds of the time."""
    interpreted = launcher.enqueue

    def enqueue(kernel: Any, grid: tuple[int, ...], args: tuple[object, ...], options: dict[str, Any]) -> None:
        ours = [value for value in args if is_ours(value)]
        constants = {name: value for name, value in options.items() if name not in OF_TRITON}
        warps, stages, registers = map(options.get, OF_TRITON)
        signature = signatures.signature_of(kernel, args, constants, warps, stages, registers)
        gpu.captures.compile(f"{signature.describe()}, aligned {signature.aligned}")
        hosts = tuple(on_host(value) if is_ours(value) else value for value in args)
        gpu.launch(kernel.fn.__name__, lambda: interpreted(kernel, grid, hosts, options), ours, ())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "enqueue", enqueue)
        patch.setattr(libraries, "runs_triton", lambda device: device.type == KIND)
        patch.setattr(interpreter.grids.interpreter_builder, "options", interpreter.UNCHECKED)
        yield
