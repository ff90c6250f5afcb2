"""Decide the sizes of a node's core: pages, rows and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from msgspec.structs import astuple

from shared.config.machine.host_memory import host_memory
from shared.config.processes import NodeParts
from shared.core.errors import ConfigError
from shared.device.gpu import Gpu
from shared.device.passed_checks import has_passed
from shared.device.torch_cuda import TorchCuda
from shared.kv.layout import layer_ends, page_bytes, page_windows
from shared.model.math.interface import Model
from shared.node.assembly.assemble import CoreSizes, pool_planes
from shared.node.assembly.build_model import Loaded
from shared.node.assembly.gpu_memory import GpuUse, measure_use, tightest
from shared.node.assembly.memory_plan import MemoryPlan, plan_memory
from shared.node.records.core import NodeCore
from shared.observe.log import Logger
from shared.ranks.orders import RankUse
from shared.sched.steps.settings import SchedSettings
from shared.transfer.transports import CHECKED, available_transports

OF_RANKS = "zmq"  # the transport of nodes whose ranks have pages of their own


def measured_plan(
    parts: NodeParts,
    loaded: Loaded,
    device: str,
    depth: int,
    gpu: Gpu | None,
    make_least: Callable[[], NodeCore],
    log: Logger,
    measure_others: Callable[[], Sequence[RankUse]],
) -> MemoryPlan:
    """`make_least` makes a core with two pages, to measure steps on a GPU. `measure_others`: asks the other ranks.

    All ranks have equally many pages, as many as the GPU with the least room has."""
    memory, max_context = parts.memory, loaded.model.spec.max_context
    planes = pool_planes(loaded.model, loaded.drafter, memory.page_size)
    num_bytes = page_bytes(planes)
    use = None if gpu is None else measure_use(gpu, torch.device(device), make_least, memory, num_bytes)
    if use is not None:
        use = tightest([use, *(GpuUse(*astuple(one)) for one in measure_others())], memory.gpu_mem_fraction)
    plan = plan_memory(
        parts, max_context, num_bytes, depth, device, available_bytes(loaded), use, len(page_windows(planes))
    )
    log.info("KV memory", pages=plan.num_pages, page_size=memory.page_size, max_context=plan.max_context)
    if use is not None:
        log.info("GPU memory", **use.parts(plan.num_pages * num_bytes))
    return plan


def available_bytes(loaded: Loaded) -> int:
    _, available = host_memory()
    return available - loaded.mapped_bytes


def core_sizes(parts: NodeParts, device: str, plan: MemoryPlan) -> CoreSizes:
    memory, shares = parts.memory, parts.node.role == "prefill" and "shm" in transports(parts, device)
    maps_pages = device == "cpu" and parts.parallel.num_ranks > 1
    return CoreSizes(
        plan.num_pages,
        memory.max_running,
        memory.prefix_cache,
        shared_memory=shares or maps_pages,
        cold_pages=plan.cold_pages,
        cold_file_pages=plan.cold_file_pages,
        cold_dir=memory.offload_dir,
    )


def sched_settings(parts: NodeParts, model: Model, device: str, plan: MemoryPlan) -> SchedSettings:
    return SchedSettings(
        page_size=parts.memory.page_size,
        max_context=plan.max_context,
        chunk_size=parts.sched.chunk_size,
        mixed_chunk_size=parts.sched.mixed_chunk_size,
        width=parts.spec.width,
        max_ungranted_pages=max(1, int(parts.memory.max_pinned_fraction * plan.num_pages)),
        growth_reserve=parts.sched.growth_reserve,
        device=device,
        layer_ends=layer_ends(model.kv_planes(parts.memory.page_size), parts.transfer.layer_parts),
    )


def transports(parts: NodeParts, device: str) -> tuple[str, ...]:
    receives, trusts_network = parts.node.role == "decode", parts.transfer.trust_network
    setting, checked = parts.node.transport, shares_gpu_memory(device)
    if device != "cpu" and parts.parallel.num_ranks > 1:
        if setting not in ("auto", OF_RANKS):
            raise ConfigError(f"--transport {setting}: ranks on GPUs hand pages over by {OF_RANKS} only")
        return (OF_RANKS,)
    return available_transports(setting, device, receives=receives, trusts_network=trusts_network, checked=checked)


def shares_gpu_memory(device: str) -> bool:
    """Return whether this machine's GPUs passed the check of cuda_ipc."""
    return device == "cuda" and has_passed(CHECKED, TorchCuda())
