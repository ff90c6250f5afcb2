"""Implement `Gpu` with torch.cuda. CUDA is initialised only at the first call that needs a device."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import astuple
from typing import Any, cast

import torch

from shared.device.gpu import Context, DeviceInfo, GpuEvent, GpuGraph, GpuStream, MemoryInfo, MemoryUse, SharedBlock


class TorchCuda:
    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def use_device(self, device: torch.device) -> Context:
        return torch.cuda.device(device)

    def uuid(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def memory_info(self, device: torch.device) -> MemoryInfo:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return MemoryInfo(free_bytes, total_bytes)

    def memory_use(self, device: torch.device) -> MemoryUse:
        return MemoryUse(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))

    def forget_peak(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def release_cached(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def new_stream(self, device: torch.device) -> GpuStream:
        return cast(GpuStream, torch.cuda.Stream(device=device))

    def current_stream(self, device: torch.device) -> GpuStream:
        return cast(GpuStream, torch.cuda.current_stream(device))

    def use_stream(self, stream: GpuStream) -> Context:
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def new_event(self, *, timing: bool = False, blocking: bool = False) -> GpuEvent:
        return cast(GpuEvent, torch.cuda.Event(enable_timing=timing, blocking=blocking))

    def closure_mode(self) -> Context:
        return torch.inference_mode()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def new_graph_memory(self) -> object:
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def capture(self, memory: object) -> Generator[GpuGraph, None, None]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=cast(Any, memory), capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            with contextlib.suppress(Exception):  # ends the useless capture; only the first error counts
                end_capture(graph, memory)
            raise
        end_capture(graph, memory)

    def share(self, tensor: torch.Tensor) -> SharedBlock:
        shared: Any = tensor.untyped_storage()._share_cuda_()
        return SharedBlock(*shared)

    def open_shared(self, block: SharedBlock) -> torch.Tensor:
        storage = torch.UntypedStorage._new_shared_cuda(*astuple(block))
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def describe(self, device: torch.device) -> DeviceInfo:
        others = [number for number in range(self.device_count()) if number != device.index]
        peers = [number for number in others if torch.cuda.can_device_access_peer(device, number)]
        return DeviceInfo(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), tuple(peers))

    def built_for(self) -> str:
        return torch.version.cuda or ""


def end_capture(graph: torch.cuda.CUDAGraph, memory: object) -> None:
    """End a capture. If CUDA has invalidated it, torch forgets to take its allocator out of the capture: then memory
    that runs out is never taken from the cache again."""
    try:
        graph.capture_end()
    except Exception:
        allocator: Any = torch.cuda.memory
        with contextlib.suppress(Exception):  # it is out of the capture if only the graph could not be made
            allocator._cuda_endAllocateToPool(torch.cuda.current_device(), memory)
            allocator._cuda_releasePool(torch.cuda.current_device(), memory)
        raise
