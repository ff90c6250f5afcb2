"""Streams of the CUDA backend on a virtual GPU: four different ones, ordered on the device, and nobody
is told too early.

`laziness=1.0`: nothing runs until somebody waits for it, so what fires too early fires before the work is done.
"""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from shared.core.errors import ConfigError
from shared.device.cuda import CudaStream, draw_stream
from shared.device.cuda_thread import ThreadedCudaStream
from shared.device.events import Event, StreamSkipped
from shared.device.streams import StreamSet, make_streams
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import VirtualGpu, make_device

SEEDS = 25
WANTED = [1, 2, 3, 4]


def lazy() -> VirtualGpu:
    return make_device("deferring", seed=3, laziness=1.0)


def ready(gpu: VirtualGpu, values: list[int] = WANTED) -> torch.Tensor:
    made = torch.tensor(values, device=gpu.device)
    gpu.synchronize(gpu.device)
    return made


def handles(streams: StreamSet) -> list[int]:
    drawn = [stream for stream in streams.all() if isinstance(stream, CudaStream | ThreadedCudaStream)]
    return [stream.cuda_stream.cuda_stream for stream in drawn]


@pytest.mark.rule("H7")
def test_a_handle_that_is_in_use_is_drawn_again() -> None:
    """H7: two streams with one handle are one stream; nothing would overlap, and nobody would see it."""
    gpu = make_device()
    gpu.pool = itertools.cycle((5, 5, 6, 5, 6, 7, 7, 5, 8, 8))
    streams = make_streams("cuda", gpu=gpu)
    assert handles(streams) == [5, 6, 7, 8]
    streams.stop()


def test_a_pool_without_another_one_is_refused() -> None:
    gpu = make_device()
    gpu.pool = itertools.cycle((5, 6))
    with pytest.raises(ConfigError, match="in use"):
        draw_stream(gpu, gpu.device, (5, 6))


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("reader", ["copy", "transfer"])
def test_a_wait_orders_work_on_the_device(reader: str, sanitize: bool) -> None:
    """Nothing runs before all is enqueued: the wait can't be for an event that is complete already."""
    for seed in range(SEEDS):
        gpu, enqueued = make_device("deferring", seed, sanitize=sanitize), threading.Event()
        streams = make_streams("cuda", gpu=gpu)
        target, fresh = ready(gpu, [0] * 4), ready(gpu)

        def read(target: torch.Tensor = target, enqueued: threading.Event = enqueued) -> torch.Tensor:
            try:
                return (target + 0).to("cpu", non_blocking=True)
            finally:
                enqueued.set()

        with gpu.held():
            written = streams.forward.launch(lambda target=target, fresh=fresh: target.copy_(fresh))
            getattr(streams, reader).wait(written.done)
            ticket = getattr(streams, reader).launch(read)
            assert enqueued.wait(HANG_GUARD_S)
        assert ticket.take(HANG_GUARD_S).tolist() == WANTED
        streams.stop()
        assert not gpu.races


@pytest.mark.parametrize(("writer", "reader"), [("transfer", "forward"), ("cold", "transfer"), ("transfer", "copy")])
def test_a_wait_for_a_transfer_orders_too(writer: str, reader: str) -> None:
    for seed in range(SEEDS):
        gpu, written = make_device("deferring", seed), Event("written")
        streams = make_streams("cuda", gpu=gpu)
        target, fresh = ready(gpu, [0] * 4), ready(gpu)

        def write(target: torch.Tensor = target, fresh: torch.Tensor = fresh, written: Event = written) -> None:
            target.copy_(fresh)
            written.fire()

        getattr(streams, writer).launch(write, fires=[written])
        getattr(streams, reader).wait(written)
        read = getattr(streams, reader).launch(lambda target=target: (target + 0).to("cpu", non_blocking=True))
        assert read.take(HANG_GUARD_S).tolist() == WANTED
        streams.stop()
        assert not gpu.races


@pytest.mark.parametrize("name", ["forward", "transfer"])
def test_an_event_completes_when_the_device_got_there(name: str) -> None:
    gpu = lazy()
    streams, x, half = make_streams("cuda", gpu=gpu), ready(gpu), Event("half")
    seen: list[list[int]] = []
    half.add_callback(lambda _: seen.append(host.tolist()))
    host = gpu.pinned((4,), torch.int64)

    def closure() -> None:
        host.copy_(x, non_blocking=True)
        half.fire()
        host.copy_(x + 1, non_blocking=True)

    getattr(streams, name).launch(closure, fires=[half]).done.synchronize(HANG_GUARD_S)
    seen.append(host.tolist())
    streams.stop()
    assert seen[-1] == [2, 3, 4, 5]
    assert seen[0] in (WANTED, [2, 3, 4, 5])


def test_a_transfer_may_block_and_the_loop_goes_on() -> None:
    gpu, gate = lazy(), threading.Event()
    streams, x = make_streams("cuda", gpu=gpu), ready(gpu)
    mine = threading.get_ident()

    def pull() -> tuple[int, list[int]]:
        assert gate.wait(HANG_GUARD_S)
        return threading.get_ident(), x.tolist()

    ticket = streams.transfer.launch(pull)
    behind = streams.transfer.launch(lambda: "behind")
    assert streams.forward.launch(threading.get_ident).take(HANG_GUARD_S) == mine
    assert not ticket.done.query() and not behind.done.query()
    gate.set()
    thread, values = ticket.take(HANG_GUARD_S)
    assert thread != mine and values == WANTED and behind.take(HANG_GUARD_S) == "behind"
    streams.stop()


def test_a_transfer_waits_for_an_event_of_the_host() -> None:
    gpu, gate = lazy(), Event("gate")
    streams = make_streams("cuda", gpu=gpu)
    streams.transfer.wait(gate)
    ticket = streams.transfer.launch(lambda: "after")
    streams.cold.launch(lambda: None).take(HANG_GUARD_S)
    assert not ticket.done.query()
    gate.fire()
    assert ticket.take(HANG_GUARD_S) == "after"
    streams.stop()


@pytest.mark.parametrize("name", ["transfer", "cold"])
def test_a_transfer_that_raises_is_over_when_its_copies_are(name: str) -> None:
    gpu = lazy()
    streams, x, host = make_streams("cuda", gpu=gpu), ready(gpu), gpu.pinned((4,), torch.int64)

    def pull() -> None:
        host.copy_(x, non_blocking=True)
        raise ValueError("peer is gone")

    ticket = getattr(streams, name).launch(pull)
    with pytest.raises(ValueError, match="gone"):
        ticket.take(HANG_GUARD_S)
    assert host.tolist() == WANTED
    streams.stop()


def test_each_thread_has_the_stream_and_the_mode_of_its_closures() -> None:
    gpu, started = lazy(), []
    streams = make_streams("cuda", gpu=gpu, on_thread_start=lambda: started.append(threading.current_thread().name))
    where = [
        stream.launch(lambda: (gpu.current_stream().cuda_stream, torch.is_inference_mode_enabled())).take(HANG_GUARD_S)
        for stream in streams.all()
    ]
    assert where == [(handle, True) for handle in handles(streams)]
    assert gpu.current_stream().cuda_stream == 0 and sorted(started) == ["stream-cold", "stream-transfer"]
    streams.stop()


def test_the_host_is_woken_for_what_it_waits_for_only() -> None:
    calls: list[str] = []
    streams = make_streams("cuda", gpu=lazy(), notify=lambda: calls.append(threading.current_thread().name))
    for stream in streams.all():
        for _ in range(3):
            stream.launch(lambda: None).take(HANG_GUARD_S)
    streams.stop()
    assert sorted(calls) == ["marks-copy"] * 3 + ["stream-cold"] * 3 + ["stream-transfer"] * 3


def test_a_device_fault_wakes_everybody(caplog: pytest.LogCaptureFixture) -> None:
    """Before it something was enqueued, behind it nothing can be: both are told."""
    gpu = lazy()
    streams, x = make_streams("cuda", gpu=gpu), ready(gpu)
    with gpu.held():
        before = streams.forward.launch(lambda: x + 1)
        gpu.break_down(ValueError("illegal address"))
        behind = streams.forward.launch(lambda: x + 1)
        early = Event("early")
        transfers = [
            streams.transfer.launch(early.fire, fires=[early]),
            streams.transfer.launch(lambda: x + 1),
        ]
        streams.transfer.wait(before.done)
    for ticket in (before, behind, *transfers):
        ticket.done.synchronize(HANG_GUARD_S)
    assert isinstance(before.done.error, torch.AcceleratorError)
    assert isinstance(behind.error, torch.AcceleratorError) and isinstance(early.error, torch.AcceleratorError)
    assert all(isinstance(ticket.error, torch.AcceleratorError | StreamSkipped) for ticket in transfers)
    streams.stop()
    assert "device fault" in caplog.text


def test_a_wait_behind_a_device_fault_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    gpu, gate = lazy(), threading.Event()
    streams, x = make_streams("cuda", gpu=gpu), ready(gpu)
    with gpu.held():
        streams.transfer.launch(lambda: gate.wait(HANG_GUARD_S))
        newest = streams.forward.launch(lambda: x + 1)
        streams.transfer.wait(newest.done)
        ticket = streams.transfer.launch(lambda: 1)
        gpu.break_down(ValueError("illegal address"))
        gate.set()
        ticket.done.synchronize(HANG_GUARD_S)
    assert ticket.error is not None
    streams.stop()
    assert "at a wait for event" in caplog.text


def test_what_comes_behind_the_end_is_skipped() -> None:
    streams, arm = make_streams("cuda", gpu=lazy()), Event("arm")
    streams.stop()
    for stream in streams.all():
        with pytest.raises(StreamSkipped):
            stream.launch(lambda: 1, fires=[arm]).take(HANG_GUARD_S)
    assert isinstance(arm.error, StreamSkipped)


def test_behind_an_event_of_the_host_launches_are_held_in_order() -> None:
    """And those of a stream that waits for what is held."""
    gpu, gate, ran = lazy(), Event("gate"), list[str]()
    streams = make_streams("cuda", gpu=gpu)
    forward, copy = streams.forward, streams.copy
    forward.launch(lambda: ran.append("before"))
    forward.wait(gate)
    held = forward.launch(lambda: ran.append("held"))
    copy.wait(held.done)
    read = copy.launch(lambda: ran.append("read"))
    copy.launch(lambda: ran.append("read again"))
    forward.launch(lambda: ran.append("last"))
    assert ran == ["before"] and not held.done.query()
    gate.fire()
    assert sorted(ran) == sorted(["before", "held", "read", "read again", "last"])
    assert ran.index("held") < ran.index("read") < ran.index("read again") and ran.index("held") < ran.index("last")
    read.take(HANG_GUARD_S)
    streams.stop()


def test_the_host_waits_for_a_transfer_and_launches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, gate, synchronize = lazy(), threading.Event(), Event.synchronize

    def open_gate(event: Event, timeout_s: float | None = None) -> None:
        gate.set()
        synchronize(event, timeout_s)

    streams = make_streams("cuda", gpu=gpu)
    pull = streams.transfer.launch(lambda: gate.wait(HANG_GUARD_S))
    monkeypatch.setattr(Event, "synchronize", open_gate)
    streams.forward.wait(pull.done)
    assert gate.is_set() and pull.done.query()
    assert streams.forward.launch(threading.get_ident).take(HANG_GUARD_S) == threading.get_ident()
    streams.stop()


def test_what_is_held_when_the_stream_stops_is_skipped() -> None:
    gpu, gate = lazy(), Event("gate")
    streams = make_streams("cuda", gpu=gpu)
    streams.forward.wait(gate)
    held = streams.forward.launch(lambda: None)
    streams.stop()
    assert isinstance(held.error, StreamSkipped) and held.done.query()
    gate.fire()


def test_held_work_that_raises_fails_its_epoch_and_no_other() -> None:
    gpu, gate = lazy(), Event("gate")
    streams = make_streams("cuda", gpu=gpu)
    streams.forward.wait(gate)
    broken = streams.forward.launch(lambda: 1 // 0)
    behind = streams.forward.launch(lambda: None)
    streams.copy.wait(behind.done)
    read = streams.copy.launch(lambda: "read")
    gate.fire()
    assert read.take(HANG_GUARD_S) == "read"
    assert isinstance(broken.error, ZeroDivisionError) and isinstance(behind.error, StreamSkipped)
    streams.stop()


def test_what_is_held_behind_a_device_fault_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """The stream can't wait for a mark any more: what is behind the wait does not run, and nobody waits for ever."""
    gpu, gate = lazy(), Event("gate")
    streams, x = make_streams("cuda", gpu=gpu), ready(gpu)
    with gpu.held():
        streams.forward.wait(gate)
        before = streams.copy.launch(lambda: x + 1)
        streams.forward.wait(before.done)
        held = streams.forward.launch(lambda: x + 1)
        streams.copy.wait(held.done)
        read = streams.copy.launch(lambda: x + 1)
        gpu.break_down(ValueError("illegal address"))
        gate.fire()
        assert held.done.query() and read.done.query()
    assert all(isinstance(ticket.error, torch.AcceleratorError | StreamSkipped) for ticket in (held, read))
    streams.stop()
    assert "at a wait for event" in caplog.text
