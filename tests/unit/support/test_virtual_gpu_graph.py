"""Graphs of the virtual GPU: they replay on the memory they were captured with, and a capture refuses what a real one
does not survive."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

from tests.support.virtual_gpu.device import VirtualGpu, make_device
from tests.support.virtual_gpu.graph import GraphMemory, VirtualGraph

MODES = ("eager", "deferring")
NOT_PERMITTED = "operation not permitted when stream is capturing"


@pytest.fixture(params=MODES)
def gpu(request: pytest.FixtureRequest) -> VirtualGpu:
    return make_device(request.param, seed=7)


def captured(gpu: VirtualGpu, region: Callable[[], object], memory: GraphMemory | None = None) -> VirtualGraph:
    """On a stream of its own, after the region has run there once."""
    stream = gpu.new_stream(gpu.device)
    gpu.synchronize(gpu.device)
    with gpu.use_stream(stream):
        region()
        gpu.synchronize(gpu.device)
        with gpu.capture(memory or gpu.new_graph_memory()) as graph:
            region()
    return graph


def ints(gpu: VirtualGpu, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=gpu.device)


def test_a_graph_runs_again_on_what_lies_in_its_memory(gpu: VirtualGpu) -> None:
    x, out = ints(gpu, 1, 2), ints(gpu, 0, 0)

    def region() -> None:
        out.copy_((x * 2 + 1).cumsum(0))

    graph = captured(gpu, region)
    for values in ((5, 6), (-1, 0)):
        x.copy_(torch.tensor(values))
        with gpu.counting() as counts:
            graph.replay()
        assert (counts.replays, counts.launches, counts.syncs) == (1, 0, 0)
        assert out.cpu().tolist() == torch.tensor(values).mul(2).add(1).cumsum(0).tolist()


def test_nothing_runs_while_it_is_captured(gpu: VirtualGpu) -> None:
    x, stream = ints(gpu, 1), gpu.new_stream(gpu.device)
    x.add_(1)
    gpu.synchronize(gpu.device)
    with gpu.counting() as counts, gpu.use_stream(stream), gpu.capture(gpu.new_graph_memory()) as graph:
        x.add_(1)
    assert (counts.captured, counts.launches) == (1, 0) and x.cpu().tolist() == [2]
    graph.replay()
    gpu.synchronize(gpu.device)
    assert x.cpu().tolist() == [3]


def test_host_numbers_are_baked_in(gpu: VirtualGpu) -> None:
    """The trap: a number of the host is the one of the capture for ever."""
    x, number = ints(gpu, 1), [10]
    graph = captured(gpu, lambda: x.add_(number[0]))
    number[0] = 1000
    graph.replay()
    gpu.synchronize(gpu.device)
    assert x.cpu().tolist() == [21]


def test_graphs_of_one_memory_use_each_other_s(gpu: VirtualGpu) -> None:
    """What the first leaves is overwritten by the second's replay; temporary memory is used again within one, too."""
    memory, x, kept = gpu.new_graph_memory(), torch.ones(1000, device=gpu.device), list[torch.Tensor]()

    def region() -> None:
        one = x + 1
        two = one * 2
        del one
        kept[:] = [two + 1]

    first = captured(gpu, region, memory)
    size = memory.num_bytes
    left = kept.pop()
    first.replay()
    gpu.synchronize(gpu.device)
    assert left.cpu().tolist() == [5.0] * 1000
    address = left.data_ptr()
    del left
    second = captured(gpu, region, memory)
    assert memory.num_bytes == size <= 3 * 4096, "blocks are used again"
    x.fill_(7)
    second.replay()
    gpu.synchronize(gpu.device)
    assert kept[0].cpu().tolist() == [17.0] * 1000 and address in {block.start for block in memory.blocks}


def test_memory_freed_in_a_graph_is_overwritten_by_its_replay(gpu: VirtualGpu) -> None:
    """Who looks at it later sees that: here a view made by hand, as a kernel with an old address."""
    x, old = ints(gpu, 3), list[torch.Tensor]()

    def region() -> None:
        y = x + 1
        old[:] = [next(block.memory for block in memory.blocks if block.start == y.data_ptr())] if memory.blocks else []
        del y
        x.add_(0)

    memory = gpu.new_graph_memory()
    graph = captured(gpu, region, memory)
    graph.replay()
    gpu.synchronize(gpu.device)
    assert set(old[0].tolist()) == {0xF5}


def test_a_pool_goes_with_the_only_graph_that_used_it(gpu: VirtualGpu) -> None:
    """As torch's: one that a whole graph uses stays."""
    x, memory, shared = ints(gpu, 1), gpu.new_graph_memory(), gpu.new_graph_memory()
    captured(gpu, lambda: x.add_(1), shared)
    for pool in (memory, shared):
        stream = gpu.new_stream(gpu.device)
        with pytest.raises(ValueError, match="inside"), gpu.use_stream(stream), gpu.capture(pool):
            raise ValueError("inside")
    captured(gpu, lambda: x.add_(1), shared)
    with pytest.raises(RuntimeError, match="take a new one"):
        captured(gpu, lambda: x.add_(1), memory)


def test_a_capture_takes_no_memory_from_the_cache() -> None:
    """As torch's: what is free there must be released before."""
    gpu = make_device("eager", memory_bytes=3 << 20)
    size, stream = 2 << 20, gpu.new_stream(gpu.device)
    torch.empty(size, dtype=torch.uint8, device=gpu.device)

    def take() -> torch.Tensor:
        with gpu.use_stream(stream), gpu.capture(gpu.new_graph_memory()):
            return torch.empty(size, dtype=torch.uint8, device=gpu.device)

    with pytest.raises(torch.OutOfMemoryError):
        take()
    gpu.release_cached(gpu.device)
    assert len(take()) == size


def test_a_graph_is_not_replayed_on_memory_that_is_gone(gpu: VirtualGpu) -> None:
    borrowed, out = [ints(gpu, 1, 2)], ints(gpu, 0, 0)
    graph = captured(gpu, lambda: out.copy_(borrowed[0] + 1))
    graph.replay()
    borrowed.clear()
    with pytest.raises(AssertionError, match=r"freed since its capture; replayed at tests/unit/\S+:\d+"):
        graph.replay()


def test_a_branch_that_joins_back_is_a_part_of_the_graph(gpu: VirtualGpu) -> None:
    x, y, side = ints(gpu, 1), ints(gpu, 1), gpu.new_stream(gpu.device)

    def region() -> None:
        begun, ended = gpu.new_event(), gpu.new_event()
        begun.record()
        side.wait_event(begun)
        with gpu.use_stream(side):
            y.add_(1)
            ended.record()
        x.add_(1)
        gpu.current_stream().wait_event(ended)

    graph = captured(gpu, region)
    for _ in range(2):
        graph.replay()
    gpu.synchronize(gpu.device)
    assert x.cpu().tolist() == y.cpu().tolist() == [4]


def pageable_up(gpu: VirtualGpu, x: torch.Tensor) -> None:
    x.copy_(torch.zeros(4, dtype=torch.int64))


def pageable_down(gpu: VirtualGpu, x: torch.Tensor) -> None:
    torch.zeros(4, dtype=torch.int64).copy_(x, non_blocking=True)


def item(gpu: VirtualGpu, x: torch.Tensor) -> None:
    x[0].item()


def nonzero(gpu: VirtualGpu, x: torch.Tensor) -> None:
    x.nonzero()


def mask(gpu: VirtualGpu, x: torch.Tensor) -> None:
    x[x > 1] = x[1:].clone()  # a number would be an argument of the kernel


def host_index(gpu: VirtualGpu, x: torch.Tensor) -> None:
    x[torch.tensor([1, 2])] = x[:2].clone()


def stream_wait(gpu: VirtualGpu, x: torch.Tensor) -> None:
    gpu.current_stream().synchronize()


def device_wait(gpu: VirtualGpu, x: torch.Tensor) -> None:
    gpu.synchronize(gpu.device)


def event_wait(gpu: VirtualGpu, x: torch.Tensor) -> None:
    event = gpu.new_event()
    event.record()
    event.synchronize()


def query(gpu: VirtualGpu, x: torch.Tensor) -> None:
    gpu.new_event().query()


def pinned(gpu: VirtualGpu, x: torch.Tensor) -> None:
    gpu.pinned((4,), torch.int64)


def other_memory(gpu: VirtualGpu, x: torch.Tensor) -> None:
    with gpu.use_stream(gpu.new_stream(gpu.device)):
        torch.empty(4, device=gpu.device)


def other_stream(gpu: VirtualGpu, x: torch.Tensor) -> None:
    with gpu.use_stream(gpu.new_stream(gpu.device)):
        x.add_(1)


def uncaptured_wait(gpu: VirtualGpu, x: torch.Tensor) -> None:
    event = gpu.new_event()
    event.record(gpu.new_stream(gpu.device))
    gpu.current_stream().wait_event(event)


def first_launch(gpu: VirtualGpu, x: torch.Tensor) -> None:
    torch.bitwise_xor(x, 5)


REFUSALS = {
    pageable_up: "a copy out of pageable memory",
    pageable_down: "the host would wait",
    item: "the host would wait",
    nonzero: "the host would wait",
    mask: "the host would wait",
    host_index: "a copy out of pageable memory",
    stream_wait: "the host would wait",
    device_wait: "the host would wait",
    event_wait: "the host would wait",
    query: "a question to the device",
    pinned: "memory from elsewhere",
    other_memory: "memory from elsewhere",
    other_stream: "which the capture does not have",
    uncaptured_wait: "waits for what was not captured",
    first_launch: "the first compilation or tuning of",
}


@pytest.mark.parametrize("region", REFUSALS, ids=lambda region: region.__name__)
def test_a_capture_refuses(region: Callable[[VirtualGpu, torch.Tensor], None], gpu: VirtualGpu) -> None:
    """And says where; outside of one the same is right. What went wrong in a capture makes it of no use."""
    x, stream, swallowed = ints(gpu, 1, 2, 3, 4), gpu.new_stream(gpu.device), False
    if region is not first_launch:
        region(gpu, x)
    gpu.synchronize(gpu.device)
    lines, first = inspect.getsourcelines(region)
    with (
        gpu.use_stream(stream),
        pytest.raises(torch.AcceleratorError, match="capture was invalidated") as ended,
        gpu.capture(gpu.new_graph_memory()) as graph,
    ):
        with pytest.raises(torch.AcceleratorError, match=NOT_PERMITTED) as raised:
            region(gpu, x)
        swallowed = True
    told = str(raised.value)
    assert swallowed and REFUSALS[region] in told and REFUSALS[region] in str(ended.value)
    places = [f"tests/unit/support/test_virtual_gpu_graph.py:{line}" for line in range(first, first + len(lines))]
    assert any(f"{place}" in told for place in places), told
    with pytest.raises(torch.AcceleratorError, match="never captured to its end"):
        graph.replay()
    region(gpu, x)


def test_a_stream_that_does_not_join_back_is_told(gpu: VirtualGpu) -> None:
    x, side, stream = ints(gpu, 1), gpu.new_stream(gpu.device), gpu.new_stream(gpu.device)
    x.add_(1)
    gpu.synchronize(gpu.device)
    with (
        gpu.use_stream(stream),
        pytest.raises(torch.AcceleratorError, match="unjoined work") as raised,
        gpu.capture(gpu.new_graph_memory()),
    ):
        begun = gpu.new_event()
        begun.record()
        side.wait_event(begun)
        with gpu.use_stream(side):
            x.add_(1)
    assert "tests/unit/support/test_virtual_gpu_graph.py:" in str(raised.value)


def test_an_event_of_a_capture_means_nothing_outside(gpu: VirtualGpu) -> None:
    event = gpu.new_event()
    captured(gpu, lambda: event.record())
    with pytest.raises(torch.AcceleratorError, match="an event of another capture"):
        gpu.new_stream(gpu.device).wait_event(event)


def test_no_capture_begins_in_another_nor_on_the_default_stream(gpu: VirtualGpu) -> None:
    with pytest.raises(torch.AcceleratorError, match="no capture begins"), gpu.capture(gpu.new_graph_memory()):
        raise AssertionError("began on the default stream")
    with (
        gpu.use_stream(gpu.new_stream(gpu.device)),
        gpu.capture(gpu.new_graph_memory()),
        pytest.raises(torch.AcceleratorError, match="no capture begins"),
        gpu.capture(gpu.new_graph_memory()),
    ):
        raise AssertionError("began in another")


def test_a_graph_that_was_reset_is_not_replayed(gpu: VirtualGpu) -> None:
    x = ints(gpu, 1)
    graph = captured(gpu, lambda: x.add_(1))
    graph.reset()
    with pytest.raises(torch.AcceleratorError, match="or was reset"):
        graph.replay()


def test_replays_that_nothing_orders_are_a_race() -> None:
    """The next replay's input comes on another stream: torch's detector sees it at the addresses of the graph."""
    gpu = make_device("deferring", seed=3)
    x, out, other = ints(gpu, 1), ints(gpu, 0), gpu.new_stream(gpu.device)
    graph = captured(gpu, lambda: out.copy_(x + 1))
    gpu.synchronize(gpu.device)
    with gpu.use_stream(gpu.new_stream(gpu.device)):
        graph.replay()
    with gpu.use_stream(other), pytest.raises(AssertionError, match="not ordered behind"):
        x.add_(1)
