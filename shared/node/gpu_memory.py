"""Measure what a node needs of a GPU's memory before it has a KV pool: weights are there, the largest step is run.

    total    |<-- gpu_mem_fraction -------------------------------------->|   Baton leaves the rest free
             | weights | largest step, relay | reserve | KV pool          |

The memory of captured graphs is not in the plan: they are captured when the pool is there, which they read, and so
nobody knows their size before. Where it does not fit beside the pool, in the share that Baton leaves free, the capture
ends and the steps that have no graph run eagerly.

Never run on a GPU: the tests run it on a virtual one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from shared.config.settings import MemoryConfig
from shared.core.errors import ConfigError
from shared.device.gpu import Gpu, gib
from shared.engine.plan import Admission
from shared.node.core import NodeCore
from shared.sched.freeze import PlanFreezer
from shared.sched.largest import LargestSteps

TOO_LARGE = "the weights: take a smaller model, --dtype bfloat16, or --weight-dtype int8 or fp8"
LARGEST_STEP = "the largest step: lower --chunk-size, --max-running or --max-context"
KV_POOL = "the KV pool: end what else uses the GPU, or lower --gpu-mem-fraction or --kv-bytes"
RESERVED_SHARE = 0.02  # of a GPU's memory: the driver's context, libraries' workspaces, gaps between blocks


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Bytes of one GPU's memory, when there is no KV pool yet."""

    total: int
    free: int  # that no process uses
    weights: int  # this node's, with adapters and draft head
    largest_step: int  # what the largest step has beside them, and the relay

    @property
    def reserve(self) -> int:
        return int(RESERVED_SHARE * self.total)

    def left_for_kv(self, fraction: float) -> int:
        """Bytes; below 0 where even the rest does not fit. `fraction`: the share of the GPU that this node may use."""
        return min(int(fraction * self.total) - self.weights, self.free) - self.largest_step - self.reserve

    def parts(self, pool: int) -> dict[str, str]:
        """The sum, as the log says it. `pool`: bytes."""
        named = {"weights": self.weights, "largest_step": self.largest_step, "reserve": self.reserve, "kv": pool}
        return {name: gib(num_bytes) for name, num_bytes in {**named, "total": self.total}.items()}

    def told(self) -> str:
        return (
            f"weights take {gib(self.weights)}, the largest step {gib(self.largest_step)} and the reserve "
            f"{gib(self.reserve)} of {gib(self.total)}, of which {gib(self.free)} are free"
        )


def measure_use(
    gpu: Gpu, device: torch.device, make_core: Callable[[], NodeCore], memory: MemoryConfig, page_bytes: int
) -> GpuUse:
    """Run the largest steps on a core with a pool of two pages, and let go of it. The model is loaded. Raises
    ConfigError where memory runs out."""
    gpu.release_cached(device)
    info, weights = gpu.memory_info(device), gpu.memory_use(device).allocated_bytes
    before = GpuUse(info.total_bytes, info.free_bytes, weights, 0)
    most = max(0, before.left_for_kv(memory.gpu_mem_fraction)) // page_bytes * memory.page_size
    gpu.forget_peak(device)
    with explained(gpu, str(device), LARGEST_STEP):
        _run_largest(make_core(), most)
    step = gpu.memory_use(device).peak_bytes - weights
    gc.collect()  # a core is a ring of objects
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
    """A GPU's memory that runs out becomes a ConfigError. `what`: has no room, and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if gpu is None:
            raise
        memory, used = gpu.memory_info(torch.device(device)), gpu.memory_use(torch.device(device))
        raise ConfigError(
            f"{gib(memory.free_bytes)} of {gib(memory.total_bytes)} are free on {device} beside this node's "
            f"{gib(used.allocated_bytes)}, and that is too little for {what} ({str(error).splitlines()[0]})"
        ) from error
