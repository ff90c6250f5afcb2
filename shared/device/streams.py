"""The four streams of an engine, made for one backend. Knows nothing of what runs on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shared.core.errors import ConfigError
from shared.device.clock import Clock, CudaClock, HostClock, StillClock
from shared.device.cpu import CpuStream, do_nothing
from shared.device.cuda import CudaStream
from shared.device.cuda_thread import ThreadedCudaStream
from shared.device.gpu import Gpu
from shared.device.inline import InlineStream
from shared.device.simulated import World
from shared.device.stream import Stream
from shared.device.torch_cuda import TorchCuda

STREAM_KINDS = ("inline", "cpu", "cuda", "simulated")
NAMES = ("forward", "copy", "transfer", "cold")


@dataclass(frozen=True, slots=True)
class StreamSet:
    """forward: all of the model and every relay write; copy: results to the host; transfer: KV pages of peers; cold: KV
    pages out to the cold tier and back, so that no hand-off stands behind them. Scheduling is the host thread's, and
    touches no device."""

    forward: Stream
    copy: Stream
    transfer: Stream
    cold: Stream
    clock: Clock = field(default_factory=StillClock, kw_only=True)  # of the forward stream's work
    # of a pipeline's stages behind the first, which runs on `forward`
    stages: tuple[Stream, ...] = field(default=(), kw_only=True)
    # waits until the device has done all that it was given outside of these streams: weights, the pool's zeroes
    settle: Callable[[], None] = field(default=do_nothing, kw_only=True)

    def all(self) -> tuple[Stream, ...]:
        return self.forward, self.copy, self.transfer, self.cold, *self.stages

    def reset(self) -> None:
        """A new epoch on every stream, after the engine has drained its leases."""
        for stream in self.all():
            stream.reset()

    def reset_steps(self) -> None:
        """A new epoch on every stream that steps run on; transfers and the cold tier go on."""
        for stream in (self.forward, self.copy, *self.stages):
            stream.reset()

    def stop(self) -> None:
        for stream in self.all():
            stream.stop()


def make_streams(
    kind: str,
    *,
    on_thread_start: Callable[[], None] = do_nothing,
    notify: Callable[[], None] = do_nothing,
    device: torch.device | None = None,
    gpu: Gpu | None = None,
    world: World | None = None,
    num_stages: int = 1,
) -> StreamSet:
    """`on_thread_start` runs on each worker thread (cpu; cuda: transfer and cold). `notify` follows each completion on
    the copy, transfer and cold streams, on the worker's or the watcher's thread (cpu, cuda): only these end something
    the host waits for, and a host woken by each closure of a step takes the interpreter's lock from it. cuda: `gpu` is
    torch.cuda where None, `device` its current one. `world` is needed by simulated. `num_stages`: of the model's
    pipeline; inline has one stream for each too, so that order can be seen."""
    behind = tuple(f"stage{index}" for index in range(1, num_stages))
    notify_of = {"copy": notify, "transfer": notify, "cold": notify}
    if kind == "inline":
        inline = (InlineStream(name) for name in NAMES)
        return StreamSet(*inline, clock=HostClock(), stages=tuple(map(InlineStream, behind)))
    if kind == "cpu":
        workers = (
            CpuStream(name, on_thread_start=on_thread_start, notify=notify_of.get(name, do_nothing)) for name in NAMES
        )
        later = tuple(CpuStream(name, on_thread_start=on_thread_start) for name in behind)
        return StreamSet(*workers, clock=HostClock(), stages=later)
    if kind == "cuda" and not behind:
        gpu = gpu or TorchCuda()
        return cuda_streams(gpu, device or gpu.current_device(), on_thread_start, notify)
    if kind == "simulated" and world is not None:
        simulated = (world.stream(name) for name in NAMES)
        return StreamSet(*simulated, stages=tuple(map(world.stream, behind)))
    raise ConfigError(f"streams '{kind}': choose one of {', '.join(STREAM_KINDS)} (simulated needs a world)")


def cuda_streams(
    gpu: Gpu, device: torch.device, on_thread_start: Callable[[], None], notify: Callable[[], None]
) -> StreamSet:
    """Four different streams of the device. Steps enqueue on the loop's thread; transfers and the cold tier have
    threads of their own."""
    taken: list[int] = []

    def enqueueing(name: str, notify: Callable[[], None] = do_nothing) -> CudaStream:
        stream = CudaStream(name, device, gpu, notify=notify, taken=taken)
        taken.append(stream.cuda_stream.cuda_stream)
        return stream

    def threaded(name: str) -> ThreadedCudaStream:
        stream = ThreadedCudaStream(name, device, gpu, on_thread_start=on_thread_start, notify=notify, taken=taken)
        taken.append(stream.cuda_stream.cuda_stream)
        return stream

    steps = enqueueing("forward"), enqueueing("copy", notify)
    settle = functools.partial(gpu.synchronize, device)
    return StreamSet(*steps, threaded("transfer"), threaded("cold"), clock=CudaClock(gpu), settle=settle)
