"""Measure the GPU memory that a node needs beside its KV pool: run the largest steps with loaded weights.

    total    |<-- gpu_mem_fraction -------------------------------------->|   Baton leaves the rest free
             | weights | largest step, relay | reserve | KV pool          |

Graphs are captured later, in the memory that Baton leaves free. If this memory runs out, steps without a graph run
eagerly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from shared.config.settings.settings import MemoryConfig
from shared.core.errors import ConfigError, RankLost
from shared.device.gpu import Gpu, gib
from shared.engine.plan import Admission
from shared.node.records.core import NodeCore
from shared.sched.steps.freeze import PlanFreezer
from shared.sched.steps.largest import LargestSteps

TOO_LARGE = "the weights: use a smaller model, --dtype bfloat16, or --weight-dtype int8 or fp8"
LARGEST_STEP = "the largest step: lower --chunk-size, --max-running or --max-context"
KV_POOL = "the KV pool: end other processes on the GPU, or lower --gpu-mem-fraction or --kv-bytes"
# share of the GPU's memory for the driver's context, libraries' workspaces and gaps between blocks
RESERVED_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of one GPU's memory before there is a KV pool, in bytes."""

    total: int
    free: int  # used by no process
    weights: int  # includes the adapters and the draft head
    largest_step: int  # includes the relay

    @property
    def reserve(self) -> int:
        return int(RESERVED_SHARE * self.total)

    def left_for_kv(self, fraction: float) -> int:
        """Return the bytes left for KV; negative if other parts don't fit. `fraction`: this node's share of the GPU."""
        return min(int(fraction * self.total) - self.weights, self.free) - self.largest_step - self.reserve

    def parts(self, pool: int) -> dict[str, str]:
        """`pool`: the KV pool's bytes."""
        named = {"weights": self.weights, "largest_step": self.largest_step, "reserve": self.reserve, "kv": pool}
        return {name: gib(num_bytes) for name, num_bytes in {**named, "total": self.total}.items()}

    def describe_memory(self) -> str:
        return (
            f"weights take {gib(self.weights)}, the largest step {gib(self.largest_step)} and the reserve "
            f"{gib(self.reserve)} of {gib(self.total)}, of which {gib(self.free)} are free"
        )


def tightest(uses: Sequence[GpuUse], fraction: float) -> GpuUse:
    """Return the use that leaves the least for KV. `fraction`: as of `left_for_kv`."""
    return min(uses, key=lambda use: use.left_for_kv(fraction))


def measure_use(
    gpu: Gpu, device: torch.device, make_core: Callable[[], NodeCore], memory: MemoryConfig, page_bytes: int
) -> GpuUse:
    """Raise ConfigError if memory runs out."""
    gpu.release_cached(device)
    info, weights = gpu.memory_info(device), gpu.memory_use(device).allocated_bytes
    before = GpuUse(info.total_bytes, info.free_bytes, weights, 0)
    most = max(0, before.left_for_kv(memory.gpu_mem_fraction)) // page_bytes * memory.page_size
    gpu.forget_peak(device)
    with explained(gpu, str(device), LARGEST_STEP):
        _run_largest(make_core(), most)
    step = gpu.memory_use(device).peak_bytes - weights
    gc.collect()  # a core has reference cycles
    gpu.release_cached(device)
    return replace(before, free=gpu.memory_info(device).free_bytes, largest_step=step)


def _run_largest(core: NodeCore, num_tokens: int) -> None:
    engine = core.engine
    freezer = PlanFreezer(core.kv, core.settings)
    num_rows = core.kv.rows.num_total
    try:
        for work in LargestSteps(freezer, core.settings, engine.new_step, num_rows, num_tokens).work():
            engine.admit(work) if isinstance(work, Admission) else engine.launch(work)
            engine.wait_oldest()
            engine.collect()
    finally:
        core.pool.close()


@contextmanager
def explained(gpu: Gpu | None, device: str, what: str) -> Iterator[None]:
    """Turn the GPU's out-of-memory error into a ConfigError. `what`: the part that doesn't fit, and the remedy.

    Also one that made this rank lost, as a step of several ranks does."""
    try:
        yield
    except (torch.OutOfMemoryError, RankLost) as found:
        error = found.__cause__ if isinstance(found, RankLost) else found
        if gpu is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        memory, used = gpu.memory_info(torch.device(device)), gpu.memory_use(torch.device(device))
        raise ConfigError(
            f"{gib(memory.free_bytes)} of {gib(memory.total_bytes)} are free on {device} beside this node's "
            f"{gib(used.allocated_bytes)}, and that is too little for {what} ({str(error).splitlines()[0]})"
        ) from error
