"""Where checks run: a GPU by torch.cuda, or the tests' virtual one with tiny shapes. The checks are the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.device.torch_cuda import TorchCuda
from tests.gpu.plan import NotHere

if TYPE_CHECKING:
    from tests.support.virtual_gpu.device import VirtualGpu

DEVICES = ("cuda", "virtual")


class OneCuda(TorchCuda):
    """The real runtime, and its first device."""

    device = torch.device("cuda", 0)


class CudaPlace:
    """`tiny`: whether shapes are as small as they get. `computes`: whether tensors hold numbers."""

    tiny, computes = False, True

    def __init__(self) -> None:
        self.gpu = OneCuda()
        if not self.gpu.is_available():
            raise NotHere("torch sees no GPU here")

    @contextmanager
    def no_host_waits(self) -> Iterator[None]:
        """A call that waits for the device without saying so raises RuntimeError, on any thread."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def watched(self) -> tuple[CudaPlace, list[str]]:
        """This place with torch's stream sanitizer on for the rest of the process, and the list of what it finds."""
        from torch.cuda import _sanitizer

        found: list[str] = []

        class Recorded(_sanitizer.CUDASanitizerErrors):  # a step that fails is taken up again, so raising is not enough
            def __init__(self, errors: list[_sanitizer.SynchronizationError]) -> None:
                found.extend(map(str, errors))
                super().__init__(errors)

        _sanitizer.CUDASanitizerErrors = Recorded  # type: ignore[misc]
        _sanitizer.enable_cuda_sanitizer()
        return self, found

    def busy_share(self, work: Callable[[], None]) -> float | None:
        """Of the time that `work` took until the device was done with it, the share in which a kernel ran."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            began = time.perf_counter()  # not before: the profiler takes seconds to start
            work()
            self.gpu.synchronize(self.gpu.device)
            spent = time.perf_counter() - began
        return sum(event.self_device_time_total for event in profiled.key_averages()) / 1e6 / spent


class VirtualPlace:
    tiny, computes = True, True

    def __init__(self, gpu: VirtualGpu | None = None) -> None:
        from tests.support.virtual_gpu.device import make_device  # needs what a GPU machine may lack

        self.gpu = gpu or make_device("eager")

    @contextmanager
    def no_host_waits(self) -> Iterator[None]:
        with self.gpu.counting() as counts:
            yield
        assert counts.syncs == 0 and counts.h2d_pageable == 0, counts.by_place.most_common(5)

    def watched(self) -> tuple[VirtualPlace, list[str]]:
        from tests.support.virtual_gpu.device import make_device

        gpu = make_device("deferring", seed=1)
        return VirtualPlace(gpu), gpu.races

    def busy_share(self, work: Callable[[], None]) -> float | None:
        """None: the virtual device's kernels run on the host, and take no time of their own."""
        work()
        return None


class MetaPlace:
    """The checks of kernels at real sizes, without numbers: a test records what they launch."""

    tiny, computes = False, False

    @dataclass(frozen=True, slots=True)
    class Gpu:
        device = torch.device("meta")

    gpu = Gpu()


Place = CudaPlace | VirtualPlace


def make_place(device: str) -> Place:
    """NotHere where there is no such device."""
    return CudaPlace() if device == "cuda" else VirtualPlace()
