"""What the host does for a launch of a Triton kernel, counted and timed with a driver that launches nothing.

    python -m tests.support.kernels.launch_cost

By Triton: as Triton binds and looks up what it has compiled before. Bound: as the launcher finds it. Calls are
Python's, those of C functions included; they don't depend on the machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CHIP = 90
STREAM, FUNCTION = 7, 11
ROUNDS = 1000


@dataclass
class FakeDriver:
    """A driver of an sm_90. `launched` gets what CUDA's launcher would get, `checked` the devices of tensors that were
    compared with the current one."""

    device: int = 0
    checked: list[object] = field(default_factory=list)
    launched: list[tuple[object, ...]] = field(default_factory=list)
    utils: Any = field(
        default_factory=lambda: SimpleNamespace(
            load_binary=lambda *_: (object(), FUNCTION, 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232_448},
        )
    )

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *given: self.launched.append(given)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CHIP, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM


@contextmanager
def fake_driver(launcher: ModuleType) -> Iterator[FakeDriver]:
    """Take the tensors of a CPU for those of device 0."""
    fake, before = FakeDriver(), driver._active
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "check_device", lambda kernel, device: fake.checked.append(device))
        patch.setattr(launcher, "driver", SimpleNamespace(active=fake))
        patch.setattr(launcher, "_kernels", launcher.BoundKernels())
        driver.set_active(fake)
        try:
            yield fake
        finally:
            driver._active = before


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions `work` calls, those of C included."""
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count - 1  # setprofile itself


@dataclass(frozen=True, slots=True)
class Cost:
    """Of all launches of some work together. `us`: of the thread's own time, so that others' work counts less."""

    calls: int
    us: float

    @classmethod
    def of(cls, launch: Callable[[], object]) -> Cost:
        calls, began = calls_of(launch), time.thread_time()
        for _ in range(ROUNDS):
            launch()
        return cls(calls, (time.thread_time() - began) / ROUNDS * 1e6)


def costs(launcher: ModuleType, work: Callable[[], object]) -> tuple[Cost, Cost]:
    """Return what the launches of `work` cost by Triton, as they were before the launcher kept anything, and bound."""
    calls, enqueue = list[tuple[Any, ...]](), launcher.enqueue
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "enqueue", lambda *call: calls.append(call) or enqueue(*call))
        work()

    def by_triton() -> None:
        for kernel, grid, args, options in calls:
            launcher.check_grid(kernel, grid)
            launcher.device_of(kernel, args)
            enqueue(kernel, grid, args, options)

    def bound() -> None:
        for kernel, grid, args, options in calls:
            launcher.launch(kernel, grid, *args, **options)

    return Cost.of(by_triton), Cost.of(bound)


def launches() -> dict[str, Callable[[], object]]:
    from shared.gpu_kernel.add_norm import add_norm
    from shared.gpu_kernel.gate import gate
    from shared.gpu_kernel.paged_attention import attend_windows
    from shared.gpu_kernel.real_steps import real_steps
    from shared.gpu_kernel.sample import find_heads

    residual, weight = torch.zeros(1, 4096), torch.zeros(4096)
    delta, gate_up = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(1, 28_672, dtype=torch.bfloat16)
    step = small(next(real_steps()))
    return {
        "norm": lambda: add_norm(residual, delta, weight, 1e-5, torch.bfloat16),
        "gate": lambda: gate(gate_up, False, torch.bfloat16),
        "attention, two kernels": lambda: attend_windows(*step),
        "largest logits": lambda: find_heads(torch.zeros(1, 1024)),
    }


def small(step: Any) -> tuple[Any, ...]:
    """The arguments of attention for one row of a RealStep, in memory."""
    from shared.gpu_kernel.places import Places

    layer = replace(step.layer, kv=torch.zeros(step.layer.kv.shape, dtype=step.layer.kv.dtype))
    bounds, table = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 128, dtype=torch.int32)
    rows = replace(step.rows, cu_q_lens=bounds, page_table=table, num_rows=1, num_tokens=1, max_seq_len=2048)
    queries = torch.zeros(1, *step.queries.shape[1:], dtype=step.queries.dtype)
    return queries, torch.zeros_like(queries), layer, rows, Places(*torch.zeros(4, 4, dtype=torch.int32)[:, :1])


def main() -> None:
    from shared.gpu_kernel.launch import launcher

    print("| launches of | calls by Triton | bound | us by Triton | bound |", "|---|---|---|---|---|", sep="\n")
    with fake_driver(launcher):
        for name, launch in launches().items():
            triton, bound = costs(launcher, launch)
            print(f"| {name} | {triton.calls} | {bound.calls} | {triton.us:.1f} | {bound.us:.1f} |")


if __name__ == "__main__":
    main()
