"""Plan a node's memory: KV pages, the longest sequence, the cold tier."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.processes import NodeParts
from shared.config.settings.settings import MemoryConfig
from shared.core.errors import ConfigError
from shared.core.overshoot import overshoot
from shared.device.gpu import gib
from shared.kv.manager import page_count
from shared.node.assembly.gpu_memory import GpuUse

MIN_CONTEXT = 64  # tokens; a pool for fewer tokens is useless


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_pages: int  # including page 0, the sink
    max_context: int  # limit on the tokens of one sequence
    cold_pages: int  # in host memory; 0: no cold tier
    cold_file_pages: int  # in the cold tier's file


def least_plan(max_context: int) -> MemoryPlan:
    """Return the plan of a core that only measures steps, which write to the sink page."""
    return MemoryPlan(num_pages=2, max_context=max_context, cold_pages=0, cold_file_pages=0)


def plan_memory(
    parts: NodeParts,
    max_context: int,
    page_bytes: int,
    depth: int,
    device: str,
    available: int,
    gpu: GpuUse | None = None,
    num_groups: int = 1,
) -> MemoryPlan:
    """Raise ConfigError if something doesn't fit.

    The pool gets at most the pages that all rows use at full length. available: free bytes of the host. gpu: None
    for a pool in host memory. num_groups: of the pages (shared/kv/layout.py).
    """
    memory, past_end = parts.memory, overshoot(parts.spec.width, depth)
    most = memory.max_running * num_groups * page_count(max_context + past_end, memory.page_size)
    room = pool_bytes(memory, available) if gpu is None else gpu_pool_bytes(memory, gpu)
    num_pages = min(room // page_bytes, most)
    fits = num_pages // num_groups * memory.page_size - past_end
    wanted = parts.model.max_context or min(MIN_CONTEXT, max_context)
    if fits < wanted:
        need = page_bytes * num_groups * page_count(wanted + past_end, memory.page_size)
        share = "--mem-fraction" if gpu is None else "--gpu-mem-fraction, a smaller --chunk-size or --max-running"
        raise ConfigError(
            f"KV of one request of {wanted} tokens needs {gib(need)}, and the KV pool has {gib(room)}, for "
            f"{max(0, fits)} tokens: give it more with --kv-bytes (a page of {memory.page_size} tokens takes "
            f"{page_bytes * num_groups} bytes) or {share}, or use a shorter --max-context, a narrower --kv-dtype or a "
            "smaller model" + ("" if gpu is None else f"; {gpu.describe_memory()}")
        )
    check_offload(memory, page_bytes, device, available)
    return MemoryPlan(
        num_pages=num_pages + 1,
        max_context=min(max_context, fits),
        cold_pages=memory.offload_bytes // page_bytes,
        cold_file_pages=memory.offload_disk_bytes // page_bytes,
    )


def pool_bytes(memory: MemoryConfig, available: int) -> int:
    """Raise ConfigError if fewer than --kv-bytes are free."""
    if memory.kv_bytes > available:
        raise ConfigError(f"--kv-bytes is {memory.kv_bytes / 1e9:.2f} GB and {available / 1e9:.2f} GB are free")
    return memory.kv_bytes or int(memory.mem_fraction * available)


def gpu_pool_bytes(memory: MemoryConfig, gpu: GpuUse) -> int:
    """Raise ConfigError if too little is free."""
    left = gpu.left_for_kv(memory.gpu_mem_fraction)
    if left < max(1, memory.kv_bytes):
        raise ConfigError(
            f"{gib(max(1, memory.kv_bytes) - left)} of the GPU's memory are missing: {gpu.describe_memory()}, "
            f"and this node may use {gib(int(memory.gpu_mem_fraction * gpu.total))} "
            f"(--gpu-mem-fraction {memory.gpu_mem_fraction:g})"
            + (f", and --kv-bytes is {gib(memory.kv_bytes)}" if memory.kv_bytes else "")
            + "; use a smaller model, --weight-dtype int8 or fp8, a smaller --chunk-size or --max-running"
        )
    return memory.kv_bytes or left


def check_offload(memory: MemoryConfig, page_bytes: int, device: str, available: int) -> None:
    """Raise ConfigError for an impossible cold tier."""
    if memory.offload_bytes and device != "cpu":
        raise ConfigError(f"--offload-bytes: pages on {device} can't be offloaded yet; leave it out")
    if 0 < memory.offload_bytes < page_bytes:
        raise ConfigError(f"--offload-bytes is {memory.offload_bytes}, and one page takes {page_bytes} bytes")
    if memory.offload_bytes > available:
        raise ConfigError(
            f"--offload-bytes is {memory.offload_bytes / 1e9:.2f} GB and {available / 1e9:.2f} GB are free"
        )
