"""The virtual GPU of the tests: the CPU's arithmetic, CUDA's rules about devices, and every crossing counted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.virtual_gpu.device import VirtualGpu, make_device, make_devices

MODES = ("eager", "deferring")
Place = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=MODES)
def gpu(request: pytest.FixtureRequest) -> VirtualGpu:
    return make_device(request.param, seed=5)


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def ints(low: int, high: int, *size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed))


def written(put: Callable[[torch.Tensor, Place], object], place: Place, target: torch.Tensor) -> torch.Tensor:
    """What stands in `target` after `put`."""
    target = place(target)
    put(target, place)
    return target


def put_slice(x: torch.Tensor, place: Place) -> None:
    x[2:4] = place(numbers(2, 4, seed=9))


def put_rows(x: torch.Tensor, place: Place) -> None:
    x[place(torch.tensor([4, 0]))] = place(numbers(2, 4, seed=9))


def put_number(x: torch.Tensor, place: Place) -> None:
    x[:, 1] = 3.5


def put_mask(x: torch.Tensor, place: Place) -> None:
    x[x > 0.5] = -1.0


OPERATORS: dict[str, Callable[[Place, torch.device], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "zeros": lambda t, d: torch.zeros(3, 4, dtype=torch.int32, device=d),
    "full": lambda t, d: torch.full((3,), 7, device=d),
    "arange": lambda t, d: torch.arange(2, 30, 3, device=d),
    "tensor": lambda t, d: torch.tensor([[1, 2], [3, 4]], device=d),
    "arithmetic": lambda t, d: (t(numbers(4, 5)) * 2 + t(numbers(5, seed=1))) / 3,
    "promotion": lambda t, d: t(ints(0, 9, 4)) * 0.5 + t(numbers(4)),
    "compare": lambda t, d: (t(numbers(6)) > 0) & (t(ints(0, 4, 6)) == 1),
    "where": lambda t, d: torch.where(t(numbers(6)) > 0, t(numbers(6, seed=1)), 0.0),
    "view, transpose": lambda t, d: t(numbers(4, 6)).view(2, 2, 6).transpose(0, 2).contiguous().flatten(),
    "strided": lambda t, d: t(numbers(40)).as_strided((3, 4), (10, 2), 5) + 1,
    "bytes": lambda t, d: t(ints(0, 256, 64)).to(torch.uint8).view(4, 16)[1:].view(torch.int64).sum(-1),
    "bfloat16 bytes": lambda t, d: t(numbers(4, 8)).to(torch.bfloat16).view(torch.uint8).view(torch.bfloat16).float(),
    "float8": lambda t, d: t(numbers(4, 8)).to(torch.float8_e4m3fn).view(torch.uint8),
    "index": lambda t, d: t(numbers(5, 4))[t(torch.tensor([3, 0, 3])), t(torch.tensor([1, 1, 2]))],
    "index of the CPU": lambda t, d: t(numbers(5, 4))[torch.tensor([3, 0])],
    "mask": lambda t, d: t(numbers(5, 4))[t(numbers(5)) > 0],
    "slices": lambda t, d: written(put_slice, t, numbers(5, 4)),
    "rows put": lambda t, d: written(put_rows, t, numbers(5, 4)),
    "column of a number": lambda t, d: written(put_number, t, numbers(5, 4)),
    "mask put": lambda t, d: written(put_mask, t, numbers(5, 4)),
    "index_put": lambda t, d: t(numbers(5)).index_put_((t(torch.tensor([1, 1])),), t(numbers(2)), accumulate=True),
    "index_add": lambda t, d: t(numbers(5, 2)).index_add_(0, t(torch.tensor([1, 3])), t(numbers(2, 2, seed=3))),
    "index_copy": lambda t, d: t(numbers(5, 2)).index_copy_(0, t(torch.tensor([1, 3])), t(numbers(2, 2, seed=3))),
    "index_select": lambda t, d: t(numbers(5, 2)).index_select(0, t(torch.tensor([1, 3]))),
    "scatter": lambda t, d: t(numbers(3, 4)).scatter_(1, t(ints(0, 4, 3, 1)), t(numbers(3, 1))),
    "scatter_add": lambda t, d: t(numbers(3, 4)).scatter_add_(1, t(ints(0, 4, 3, 6)), t(numbers(3, 6))),
    "gather": lambda t, d: t(numbers(3, 4)).gather(1, t(ints(0, 4, 3, 2))),
    "masked_fill": lambda t, d: t(numbers(3, 4)).masked_fill_(t(numbers(3, 4)) > 0, float("-inf")),
    "cumsum": lambda t, d: t(ints(0, 9, 3, 7)).cumsum(-1),
    "sort": lambda t, d: tuple(t(numbers(3, 7)).sort(stable=True, descending=True)),
    "argsort": lambda t, d: t(numbers(9)).argsort(),
    "topk": lambda t, d: tuple(t(numbers(3, 9)).topk(4)),
    "max": lambda t, d: (t(numbers(3, 9)).argmax(-1), *t(numbers(3, 9)).max(-1)),
    "sum, mean, all": lambda t, d: (t(numbers(3, 9)).sum(0), t(numbers(3, 9)).mean(), (t(numbers(4)) < 9).all()),
    "matmul": lambda t, d: t(numbers(3, 4)) @ t(numbers(4, 5)),
    "bmm": lambda t, d: t(numbers(2, 3, 4)) @ t(numbers(2, 4, 5)),
    "einsum": lambda t, d: torch.einsum("bqd,bkd->bqk", t(numbers(2, 3, 4)), t(numbers(2, 5, 4))),
    "linear": lambda t, d: F.linear(t(numbers(3, 4)), t(numbers(5, 4, seed=1)), t(numbers(5))),
    "embedding": lambda t, d: F.embedding(t(ints(0, 6, 3)), t(numbers(6, 4))),
    "softmax": lambda t, d: torch.softmax(t(numbers(3, 4)), -1) + torch.log_softmax(t(numbers(3, 4)), -1),
    "norm": lambda t, d: F.rms_norm(t(numbers(3, 4)), (4,)) * torch.rsqrt(t(numbers(3, 4)).pow(2).mean(-1, True)),
    "silu": lambda t, d: F.silu(t(numbers(3, 4))) * F.gelu(t(numbers(3, 4))),
    "attention": lambda t, d: F.scaled_dot_product_attention(*(t(numbers(1, 2, 5, 8, seed=s)) for s in range(3))),
    "searchsorted": lambda t, d: torch.searchsorted(t(torch.arange(0, 20, 4)), t(ints(0, 20, 6)), right=True),
    "bucketize": lambda t, d: torch.bucketize(t(ints(0, 20, 6)), t(torch.arange(0, 20, 4))),
    "repeat": lambda t, d: t(ints(0, 9, 4)).repeat_interleave(3),
    "repeat by": lambda t, d: t(ints(0, 9, 3)).repeat_interleave(t(torch.tensor([2, 0, 3])), output_size=5),
    "repeat by, untold": lambda t, d: t(ints(0, 9, 3)).repeat_interleave(t(torch.tensor([2, 0, 3]))),
    "tile, expand": lambda t, d: t(numbers(1, 3)).expand(4, 3).repeat(1, 2),
    "cat, stack": lambda t, d: torch.cat([t(numbers(2, 3)), torch.stack([t(numbers(3)), t(numbers(3, seed=1))])]),
    "roll, flip": lambda t, d: t(numbers(2, 5)).roll(1, -1).flip(0),
    "pad": lambda t, d: F.pad(t(numbers(2, 5)), (0, 3)),
    "frexp": lambda t, d: tuple(torch.frexp(t(numbers(5)))),
    "floor": lambda t, d: (t(ints(0, 99, 5)) // 4, t(ints(0, 99, 5)) % 7, t(ints(0, 99, 5)) // torch.tensor(3)),
    "bits": lambda t, d: (t(ints(0, 99, 5)) << 3) ^ (t(ints(0, 99, 5)) >> 1) | 5,
    "clamp, round": lambda t, d: t(numbers(9)).clamp(-1, 1).mul(9).round().long().clamp_(min=t(torch.tensor(0))),
    "split, unbind": lambda t, d: (*t(numbers(6, 2)).split([1, 5]), *t(numbers(2, 3)).unbind()),
    "tril": lambda t, d: torch.ones(4, 4, dtype=torch.bool, device=d).tril(),
    "unique": lambda t, d: torch.unique(t(ints(0, 4, 9))),
    "nonzero": lambda t, d: torch.nonzero(t(ints(0, 2, 9))),
    "nothing": lambda t, d: torch.cat([t(numbers(0, 4)), t(numbers(2, 4))[t(torch.tensor([], dtype=torch.long))]]),
    "new": lambda t, d: t(numbers(3)).new_zeros(2, 2) + torch.empty_like(t(numbers(2, 2))).fill_(2),
    "clone, copy": lambda t, d: t(numbers(3, 3)).t().clone().copy_(t(numbers(3))),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_the_numbers_are_the_cpu_s(gpu: VirtualGpu, name: str) -> None:
    device, run = gpu.device, OPERATORS[name]
    on_cpu = run(lambda x: x.clone(), torch.device("cpu"))
    with gpu.counting() as counts:
        on_gpu = run(lambda x: x.to(device), device)
        many = isinstance(on_gpu, tuple)
        for got, wanted in zip(on_gpu if many else (on_gpu,), on_cpu if many else (on_cpu,), strict=True):
            assert got.device == device and got.dtype == wanted.dtype
            torch.testing.assert_close(got.cpu(), wanted)
    assert not counts.undeferred, counts.by_place


def test_the_numbers_are_the_same_in_and_out_of_inference_mode(gpu: VirtualGpu) -> None:
    with torch.inference_mode():
        inside = numbers(3, 4).to(gpu.device)
        inside[0] += 1
        both = inside + torch.ones(4, device=gpu.device)
    assert torch.equal(both.cpu()[1:], numbers(3, 4)[1:] + 1)
    outside = torch.zeros(4, device=gpu.device)
    with torch.inference_mode():
        outside[1] = 5
    outside[2] = 6
    assert outside.tolist() == [0, 5, 6, 0]


def test_any_thread_may_compute(gpu: VirtualGpu) -> None:
    results: list[float] = []

    def work() -> None:
        with torch.inference_mode():
            results.append((torch.arange(100, device=gpu.device).float() ** 2).sum().item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [328350.0] * 4


MIXED: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda x: x + torch.ones(4),
    "add in place": lambda x: x.add_(torch.ones(4)),
    "cat": lambda x: torch.cat([x, torch.ones(4)]),
    "matmul": lambda x: x @ torch.ones(4),
    "gather": lambda x: x.gather(0, torch.zeros(2, dtype=torch.long)),
    "embedding": lambda x: F.embedding(torch.zeros(2, dtype=torch.long), x[None]),
    "values put": lambda x: x.index_put_((torch.tensor([0, 1]).to(x.device),), torch.ones(2)),
    "index of the device into the CPU": lambda x: torch.ones(4)[x.long()],
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_are_refused(gpu: VirtualGpu, name: str) -> None:
    x = torch.zeros(4, device=gpu.device)
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](x)


@pytest.mark.parametrize("mode", ["eager", "deferring"])
def test_tensors_go_to_the_device_that_is_named(mode: str) -> None:
    """Of several in a process, from the CPU and from each other. Each has its own memory."""
    first, second = make_devices(2, mode)
    layer = torch.nn.Linear(3, 3).to(second.device)
    assert {parameter.device for parameter in layer.parameters()} == {second.device}
    assert second.memory_use(second.device).allocated_bytes > 0 == first.memory_use(first.device).allocated_bytes
    with torch.inference_mode():
        x = torch.ones(2, 3).to(second.device)
        right = layer(x).cpu()
        moved = layer.to(first.device)
        assert torch.equal(moved(x.to(first.device)).cpu(), right)
        with pytest.raises(RuntimeError, match="same device"):
            moved(x)


def test_numbers_of_the_cpu_are_taken(gpu: VirtualGpu) -> None:
    x = torch.zeros(4, device=gpu.device)
    with gpu.counting() as counts:
        y = torch.where(x > torch.tensor(1.0), x, torch.tensor(2.0)) + torch.tensor(1.0)
        y[torch.tensor([0, 1]).to(gpu.device)] = torch.tensor(9.0)
    assert y.tolist() == [9, 9, 3, 3] and counts.syncs == 0


def test_host_code_can_not_look_inside(gpu: VirtualGpu) -> None:
    x = torch.zeros(4, device=gpu.device)
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(x)
    with gpu.counting() as counts:
        x.data_ptr()
    assert counts.data_ptrs == 1


STOPS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[1]),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "copy to pageable memory": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x),
    "repeat": lambda x: x.repeat_interleave((x * 0 + 1).long()),
}


@pytest.mark.parametrize("name", STOPS)
def test_what_stops_the_host_is_counted_with_its_line(gpu: VirtualGpu, name: str) -> None:
    x = numbers(4).to(gpu.device)
    with gpu.counting() as counts:
        STOPS[name](x)
    assert counts.syncs == 1, counts.by_place
    (place,) = counts.by_place
    kind, where, _ = place.split(maxsplit=2)
    assert kind == "syncs" and where.startswith("tests/unit/support/test_virtual_gpu.py:")


def test_copies_are_told_apart(gpu: VirtualGpu) -> None:
    pinned = gpu.pinned((4,), torch.float32)
    pinned.copy_(numbers(4))
    with gpu.counting() as counts:
        first = numbers(4).to(gpu.device, non_blocking=True)
        second = torch.from_numpy(np.ones(4, np.float32)).to(gpu.device)
        third = pinned.to(gpu.device, non_blocking=True)
        back = third.to("cpu", non_blocking=True)
        assert back.is_pinned() and pinned[1:].is_pinned() and not torch.empty(4).is_pinned()
        torch.empty(4, device=gpu.device).copy_(pinned.flip(0), non_blocking=True)
        torch.empty(2, 4, device=gpu.device).copy_(pinned, non_blocking=True)
    assert (counts.h2d_pageable, counts.h2d_async, counts.d2h_async, counts.syncs) == (4, 1, 1, 0), counts.by_place
    gpu.synchronize(gpu.device)
    assert torch.equal(back, pinned) and torch.equal(first.cpu(), pinned) and second.tolist() == [1] * 4
    staged = numbers(4).pin_memory()
    with gpu.counting() as counts:
        staged.to(gpu.device)
    assert (counts.h2d_async, counts.syncs) == (0, 1)


def test_a_number_crosses_where_indices_say_its_places(gpu: VirtualGpu) -> None:
    """As torch sends it to a GPU: by a copy out of pageable memory. A slice, a mask and index_fill_ take it along."""
    x, places = torch.zeros(4, device=gpu.device), torch.arange(2).to(gpu.device)
    for put in (lambda: x.__setitem__(places, 5.0), lambda: x[None].__setitem__((0, places), 6)):
        with gpu.counting() as counts:
            put()
        assert (counts.h2d_pageable, counts.syncs) == (1, 0), counts.by_place
    with gpu.counting() as counts:
        x[1:] = 7.0
        x[x > 6] = 8.0
        x.index_fill_(0, places[:1], 9.0)
    assert not counts.by_place
    assert x.tolist() == [9.0, 8.0, 8.0, 8.0]


def test_division_by_a_number_multiplies_as_on_cuda(gpu: VirtualGpu) -> None:
    """By the reciprocal; by a tensor of the device, it divides."""
    host = torch.arange(1.0, 500.0)
    there, seven = host.to(gpu.device), torch.full((), 7.0, device=gpu.device)
    assert not torch.equal((there / 7).cpu(), host / 7)
    assert torch.equal((there / 7).cpu(), host * (1 / torch.tensor(7.0)))
    assert torch.equal((there / seven).cpu(), host / 7)
    assert torch.equal((7 / there).cpu(), 7 / host)


def test_plain_work_crosses_nothing(gpu: VirtualGpu) -> None:
    x = numbers(8, 8).to(gpu.device)
    with gpu.counting() as counts:
        y = torch.softmax(x @ x.t(), -1)
        y[2:4] = y[:2]
        torch.cat([y, x]).cumsum(0).sort()
    assert counts.launches > 5 and not counts.by_place


def test_memory_is_not_what_it_was(gpu: VirtualGpu) -> None:
    """What nobody wrote is far from zero, in a block that was never used and in one that was freed."""
    assert torch.empty(4, device=gpu.device).abs().min().item() > 1e30
    torch.zeros(4, device=gpu.device)
    assert torch.empty(4, device=gpu.device).abs().min().item() > 1e30
    assert gpu.pinned((4,), torch.int64).max() < -(1 << 50)


def test_memory_runs_out_and_is_used_again() -> None:
    gpu = make_device(memory_bytes=1 << 20)
    for _ in range(10):
        assert torch.zeros(1 << 19, dtype=torch.uint8, device=gpu.device).sum().item() == 0
    whole = torch.zeros(1 << 20, dtype=torch.uint8, device=gpu.device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 10, device=gpu.device)
    info = gpu.memory_info(gpu.device)
    assert (info.free_bytes, info.total_bytes) == (0, whole.numel())


def test_memory_comes_back_from_any_thread(gpu: VirtualGpu) -> None:
    held = [torch.ones(1 << 18, device=gpu.device) for _ in range(4)]
    threads = [threading.Thread(target=held.pop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    free = gpu.memory_info(gpu.device).free_bytes
    again = [torch.ones(1 << 18, device=gpu.device) for _ in range(4)]
    assert gpu.memory_info(gpu.device).free_bytes == free and len(again) == 4


def test_a_view_keeps_its_block(gpu: VirtualGpu) -> None:
    row = numbers(64, 64).to(gpu.device)[3]
    others = [torch.zeros(64, 64, device=gpu.device) for _ in range(3)]
    assert torch.equal(row.cpu(), numbers(64, 64)[3]) and len(others) == 3
