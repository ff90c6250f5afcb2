"""Make the streams of an engine for one backend."""

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
from shared.device.stream import Stream
from shared.device.torch_cuda import TorchCuda

STREAM_KINDS = ("inline", "cpu", "cuda")
NAMES = ("forward", "copy", "transfer", "cold")


@dataclass(frozen=True, slots=True)
class StreamSet:
    """An engine's streams. Scheduling runs on the host thread, without a stream.

    - forward: the whole model and every relay write
    - copy: results to the host
    - transfer: pulls and descriptions of KV pages
    - cold: copies to and from the cold tier, apart from `transfer` so that no hand-off waits for them
    """

    forward: Stream
    copy: Stream
    transfer: Stream
    cold: Stream
    clock: Clock = field(default_factory=StillClock, kw_only=True)  # measures the forward stream's work
    # a pipeline's later stages; the first stage runs on `forward`
    stages: tuple[Stream, ...] = field(default=(), kw_only=True)
    # settle() waits for device work outside these streams, such as loading weights
    settle: Callable[[], None] = field(default=do_nothing, kw_only=True)

    def all(self) -> tuple[Stream, ...]:
        return self.forward, self.copy, self.transfer, self.cold, *self.stages

    def reset(self) -> None:
        """Reset every stream, after the engine has drained its leases."""
        for stream in self.all():
            stream.reset()

    def reset_steps(self) -> None:
        """Reset the streams of steps. Transfers and the cold tier go on."""
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
    gpu: Gpu | None = None,
    num_stages: int = 1,
) -> StreamSet:
    """Raise ConfigError for an unknown `kind`.

    - `on_thread_start`: each worker thread calls it first. On cuda, only the transfer and cold streams have a worker.
    - `notify`: a worker or watcher (cpu, cuda) calls it after each completion on the copy, transfer and cold streams.
      The host waits only for these streams.
    - `gpu`: used by cuda, with its current device. The default is torch.cuda.
    - `num_stages`: number of stages in the model's pipeline. Each later stage has its own stream, even if the
      kind is inline.
    """
    behind = tuple(f"stage{index}" for index in range(1, num_stages))
    if kind == "inline":
        inline = (InlineStream(name) for name in NAMES)
        return StreamSet(*inline, clock=HostClock(), stages=tuple(map(InlineStream, behind)))
    if kind == "cpu":
        make = functools.partial(CpuStream, on_thread_start=on_thread_start)
        forward = make("forward", computes=not behind)  # a pipeline's next stage must not wait for a result
        others = (make(name, notify=notify) for name in NAMES[1:])
        later = tuple(map(make, behind))
        return StreamSet(forward, *others, clock=HostClock(), stages=later)
    if kind == "cuda" and not behind:
        gpu = gpu or TorchCuda()
        return cuda_streams(gpu, gpu.current_device(), on_thread_start, notify)
    raise ConfigError(f"streams '{kind}': choose one of {', '.join(STREAM_KINDS)}")


def cuda_streams(
    gpu: Gpu, device: torch.device, on_thread_start: Callable[[], None], notify: Callable[[], None]
) -> StreamSet:
    """Make four streams with distinct handles. Steps are enqueued on the loop's thread."""
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
