"""Tells torch what to do with tensors of a virtual GPU: one kernel for all operators, on any thread.

torch's dispatcher takes the operators apart as it does for any backend; what is left comes to `dispatch`. Views are
torch's own. Everything else is launched: the same operator, on the same memory, with the CPU's arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library
from torch.utils import backend_registration

from tests.support.virtual_gpu.blocks import BLOCKS, first_byte, on_host
from tests.support.virtual_gpu.operators import (
    KIND,
    Args,
    Facts,
    Kwargs,
    as_cuda_computes,
    facts_of,
    is_ours,
    replaced,
    require_one_device,
    shapes,
)

if TYPE_CHECKING:
    from tests.support.virtual_gpu.device import VirtualGpu

__all__ = ["BLOCKS", "GPUS", "install"]

GPUS: dict[int, VirtualGpu] = {}  # by index: the newest
CPU = torch.device("cpu")
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
aten = torch.ops.aten
_installed: list[Library] = []


def install() -> None:
    """Once per process; nothing takes it back."""
    if _installed:
        return
    backend_registration._setup_privateuseone_for_python_backend(KIND)
    everything, some = Library("_", "IMPL"), Library("aten", "IMPL")
    everything.fallback(dispatch, "PrivateUse1")
    some.impl("_to_copy", to_copy, "PrivateUse1")
    some.impl("_grouped_mm", grouped_mm, "PrivateUse1")
    _installed.extend((everything, some))
    torch.Tensor.__setitem__ = set_item  # type: ignore[method-assign,assignment]
    torch.Tensor.data_ptr = counted_data_ptr  # type: ignore[method-assign]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = is_pinned  # type: ignore[method-assign,assignment]


def dispatch(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    if op is aten.empty.memory_format:
        return empty(*args, **kwargs)
    if op is aten.empty_strided.default:
        return empty_strided(*args, **kwargs)
    if op is aten._copy_from.default:
        return copy_from(*args, **kwargs)
    if op is aten.record_stream.default:
        raise TypeError("the virtual GPU's streams are no torch.Stream: call its record_stream")
    if op is aten.histc.default and not args[0].is_floating_point():  # which the CPU can't count
        return aten.histc.default(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    op, args = as_cuda_computes(op, args)
    facts = facts_of(op)
    if facts.is_view:
        return op.redispatch(CPU_KEYS, *args, **kwargs)
    return Launch(op, facts, args, kwargs).go()


def grouped_mm(*args: Any, **kwargs: Any) -> Any:
    """One launch. torch would take it apart, as for a device without such a kernel: into a loop on the host."""
    return dispatch(aten._grouped_mm.default, *args, **kwargs)


def gpu_of(values: Sequence[Any]) -> VirtualGpu:
    """That of the first tensor or device in there."""
    for value in values:
        if is_ours(value):
            return GPUS[value.device.index]
        if isinstance(value, torch.device) and value.type == KIND:
            return GPUS[value.index or 0]
        if isinstance(value, list | tuple):
            for one in value:
                if is_ours(one):
                    return GPUS[one.device.index]
    return GPUS[0]


class Launch:
    """One operator with its arguments, on its way to the current stream."""

    def __init__(self, op: torch._ops.OpOverload, facts: Facts, args: Args, kwargs: Kwargs) -> None:
        self.op, self.facts, self.args, self.kwargs = op, facts, args, kwargs
        self.gpu = gpu_of([*args, *kwargs.values()])
        self.written = facts.written(args, kwargs)

    def go(self) -> Any:
        gpu, facts = self.gpu, self.facts
        gpu.captures.compile(self._kernel())
        if any(is_ours(tensor) for _, tensor in facts.tensors(self.args, self.kwargs)):
            for _ in range(require_one_device(facts, self.args, self.kwargs)):
                gpu.crossings.note("h2d_pageable", f"argument of {facts.name}")
                gpu.wait_for_stream()
        if facts.stops_host(self.args, self.kwargs):
            gpu.crossings.note("syncs", facts.name)
            return self._now()
        if not gpu.is_late:
            return self._now()
        try:
            written, results = self._shapes()
        except Exception:
            gpu.crossings.note("undeferred", facts.name)
            return self._now()
        return self._later(written, results)

    def _kernel(self) -> str:
        """What a real device has code for: the operator on these dtypes."""
        dtypes = [str(tensor.dtype) for _, tensor in self.facts.tensors(self.args, self.kwargs)]
        return " ".join((str(self.op), *dtypes))

    def _shapes(self) -> tuple[list[torch.Tensor], Any]:
        """What the results and written arguments will look like; None for results that are arguments."""
        if self.facts.num_fresh or not all(tensor.numel() for tensor in self.written):
            return shapes(self.op, *self.facts.with_tensors(self.args, self.kwargs))
        return self.written, None

    def _now(self) -> Any:
        """Run it, and look at its results for their shapes. The host waits where the device defers."""
        args, kwargs = self._on_host()
        results: list[Any] = []
        op = self.op  # not self, which holds tensors of the device: their memory would live until this has run
        self.gpu.launch(self.facts.name, lambda: results.append(op(*args, **kwargs)), self._ours(), self.written)
        if self.gpu.deferring:
            self.gpu.wait_for_stream()
        for tensor, host in zip(self.written, self.facts.written(args, kwargs), strict=True):
            if tensor.size() != host.size():
                tensor.data = self._adopt(host)
        return self._results(results[0], self._adopt)

    def _later(self, written: list[torch.Tensor], results: Any) -> Any:
        """Make room for the results, and enqueue."""
        for tensor, shape in zip(self.written, written, strict=True):
            if tensor.size() != shape.size():
                tensor.data = self._like(shape)
        fresh: list[torch.Tensor] = []

        def room(shape: torch.Tensor) -> torch.Tensor:
            fresh.append(self._like(shape))
            return fresh[-1]

        given = self._results(results, room)
        args, kwargs = self._on_host()
        op, places = self.op, [on_host(tensor) for tensor in fresh]

        def run() -> None:
            done = op(*args, **kwargs)
            for place, value in zip(places, tensors_in(done) if places else (), strict=True):
                place.copy_(value)

        self.gpu.launch(self.facts.name, run, self._ours(), [*self.written, *fresh])
        return given

    def _results(self, results: Any, fresh: Any) -> Any:
        """What the caller gets: the arguments that were written, and `fresh` of everything else."""
        if not self.facts.num_fresh:
            one = self.written[0] if len(self.written) == 1 else tuple(self.written)
            return one if self.facts.num_returns else None
        assert not self.written, f"{self.facts.name} both writes and returns something new"
        return replaced(results, fresh, CPU)

    def _on_host(self) -> tuple[Args, Kwargs]:
        """The arguments, with host memory in the place of ours. CPU tensors are read now, as a launch does."""

        def host(tensor: torch.Tensor) -> torch.Tensor:
            return on_host(tensor) if is_ours(tensor) else tensor.clone() if self.gpu.is_late else tensor

        args, kwargs = self.facts.with_tensors(self.args, self.kwargs)
        return (
            tuple(replaced(value, host, CPU) for value in args),
            {name: replaced(value, host, CPU) for name, value in kwargs.items()},
        )

    def _ours(self) -> list[torch.Tensor]:
        """What it reads."""
        named = self.facts.tensors(self.args, self.kwargs)
        return [tensor for name, tensor in named if is_ours(tensor) and name not in self.facts.writes]

    def _like(self, shape: torch.Tensor) -> torch.Tensor:
        return self.gpu.new_tensor(shape.size(), shape.stride(), shape.dtype)

    def _adopt(self, host: torch.Tensor) -> torch.Tensor:
        """A tensor of the device with the elements of a CPU tensor; no crossing, for they were computed here."""
        made = self._like(host)
        place = on_host(made)
        self.gpu.enqueue(self.facts.name, lambda: place.copy_(host), (), (made,))
        return made


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in tensors_in(part)] if isinstance(value, list | tuple) else []


def contiguous(size: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(1, n)
    return strides[::-1]


def empty(
    size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> torch.Tensor:
    return empty_strided(size, contiguous(size), dtype=dtype, device=device)


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    return gpu_of([device]).new_tensor(size, stride, dtype or torch.get_default_dtype())


def to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> torch.Tensor:
    """As torch's own, which can't make pinned memory for us."""
    dtype, device = dtype or self.dtype, device or self.device
    gpu = gpu_of([device, self])
    if device.type == "cpu" and non_blocking:
        out = gpu.pinned(self.size(), dtype)
    elif device.type == KIND:
        out = gpu.new_tensor(self.size(), contiguous(self.size()), dtype)
    else:
        out = torch.empty(self.size(), dtype=dtype, device=device)
    return out.copy_(self, non_blocking) if device.type != "meta" else out


def copy_from(src: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """RuntimeError at once for shapes that do not fit."""
    if not dst.numel():
        return dst
    src = src.expand(dst.size())
    if is_ours(src) and is_ours(dst):
        source, target = on_host(src), on_host(dst)
        gpu_of([dst]).launch("copy", lambda: target.copy_(source), (src,), (dst,))
    elif is_ours(dst):
        to_device(gpu_of([dst]), src, dst, non_blocking)
    else:
        to_host(gpu_of([src]), src, dst, non_blocking)
    return dst


def to_device(gpu: VirtualGpu, src: torch.Tensor, dst: torch.Tensor, non_blocking: bool) -> None:
    """Asynchronous from pinned memory as it lies: what has to be rearranged first goes through pageable memory."""
    target = on_host(dst)
    straight = gpu.is_pinned(src) and src.is_contiguous()
    if straight and non_blocking:
        gpu.crossings.note("h2d_async", "copy")
        gpu.launch("copy to device", lambda: target.copy_(src), (), (dst,))
        return
    gpu.crossings.note("syncs" if straight else "h2d_pageable", "copy")
    taken = src.clone()
    gpu.launch("copy to device", lambda: target.copy_(taken), (), (dst,))
    if not non_blocking:
        gpu.wait_for_stream()


def to_host(gpu: VirtualGpu, src: torch.Tensor, dst: torch.Tensor, non_blocking: bool) -> None:
    source = on_host(src)
    straight = gpu.is_pinned(dst) and dst.is_contiguous()
    gpu.crossings.note("d2h_async" if straight and non_blocking else "syncs", "copy")
    gpu.launch("copy to host", lambda: dst.copy_(source), (src,), ())
    if not (straight and non_blocking):
        gpu.wait_for_stream()


plain_set_item = torch.Tensor.__setitem__


def set_item(self: torch.Tensor, key: Any, value: Any) -> None:
    """A number for places that a tensor names comes from the CPU, as with CUDA: torch makes it on our device."""
    keys = key if isinstance(key, tuple) else (key,)
    if isinstance(value, int | float) and is_ours(self) and any(map(is_ours, keys)):
        value = torch.tensor(value, dtype=self.dtype)
    plain_set_item(self, key, value)


def counted_data_ptr(self: torch.Tensor) -> int:
    if is_ours(self):
        gpu_of([self]).crossings.note("data_ptrs", "data_ptr")
    return first_byte(self)


def pin_memory(self: torch.Tensor, device: object = None) -> torch.Tensor:
    pinned = GPUS[0].pinned(self.size(), self.dtype)
    return pinned.copy_(self)


def is_pinned(self: torch.Tensor, device: object = None) -> bool:
    return not is_ours(self) and GPUS[0].is_pinned(self)
